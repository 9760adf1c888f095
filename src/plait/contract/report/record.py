"""Contracts as plain dicts, for programs that read `--json`."""

from dataclasses import asdict
from typing import Any

from plait.contract.collective import Collective
from plait.contract.op import Op
from plait.contract.parameter import Parameter
from plait.contract.report.precision import (
    count_moved_bytes,
    derive_accumulator,
    derive_intensity,
    derive_wire,
    list_factors,
)
from plait.contract.report.tally import CollectiveTally, Tally, build_tally
from plait.contract.report.tile import derive_tile_fill, list_tile_problems
from plait.contract.setting import Setting, Tensor
from plait.contract.step import Gemm, Messages, Move, Step
from plait.sharding import derive_gradient_placement

Record = dict[str, Any]


def build_op_record(op: Op, setting: Setting) -> Record:
    """Everything that `op` promises the rank of `setting`."""
    return {
        "name": op.name,
        "inputs": [_build_tensor_record(tensor, setting) for tensor in op.inputs],
        "outputs": [_build_tensor_record(tensor, setting) for tensor in op.outputs],
        "parameters": [_build_parameter_record(parameter, setting) for parameter in op.parameters],
        "forward": [_build_step_record(step, op, setting) for step in op.forward],
        "again": [_build_step_record(step, op, setting) for step in op.again],
        "backward": [_build_step_record(step, op, setting) for step in op.backward],
        "saved": [
            {"name": saved.name, "shape": saved.shape, "dtype": saved.dtype, "bytes": saved.num_bytes}
            for saved in op.saved
        ],
        "totals": build_tally_record(build_tally([op])),
    }


def build_collective_record(collective: Collective) -> Record:
    """A collective, with the bytes it carries and those a rank has to send for it."""
    return {
        "kind": collective.kind,
        "axis": collective.axis,
        "degree": collective.degree,
        "dim": collective.dim,
        "op": collective.op,
        "shape": collective.shape,
        "dtype": collective.dtype,
        "payload_bytes": collective.payload_bytes,
        "sent_bytes": collective.wire_bytes_per_rank,
    }


def build_tally_record(tally: Tally) -> Record:
    """Totals over operations."""
    return {
        "forward_flops": tally.forward_flops,
        "backward_flops": tally.backward_flops,
        "forward_collectives": build_count_record(tally.forward),
        "backward_collectives": build_count_record(tally.backward),
        "saved_bytes": tally.saved_bytes,
    }


def build_count_record(tally: CollectiveTally) -> Record:
    """Collectives and messages, counted."""
    return {
        "counts": tally.counts,
        "messages": tally.num_messages,
        "payload_bytes": tally.payload_bytes,
        "sent_bytes": tally.sent_bytes,
    }


def _build_tensor_record(tensor: Tensor, setting: Setting) -> Record:
    layout = tensor.layout
    return {
        "name": tensor.name,
        "layout": str(layout),
        "placement": str(layout.placement),
        "shape": layout.shape,
        "local_shape": layout.local_shape(setting.rank),
    }


def _build_parameter_record(parameter: Parameter, setting: Setting) -> Record:
    own, layout = parameter.ownership, parameter.layout
    return {
        "name": own.name,
        "layout": str(layout),
        "placement": str(layout.placement),
        "gradient_placement": str(derive_gradient_placement(layout.placement)),
        "gradient_reduced_over": own.reduced_over,
        "shape": own.shape,
        "local_shape": own.local_shape(setting.rank),
        "owns": [(interval.start, interval.stop) for interval in own.intervals(setting.rank)],
        "is_counted": own.is_counted_on(setting.rank),
    }


def _build_step_record(step: Step, op: Op, setting: Setting) -> Record:
    match step:
        case Move(tensor, dims, collective):
            record = {"step": "collective", "tensor": tensor, "dims": dims, **build_collective_record(collective)}
            wire = derive_wire(op, step, setting.dtype)
            return record if wire is None else record | {"wire": asdict(wire)}
        case Messages():
            return {"step": "messages", **asdict(step), "sent_bytes": step.sent_bytes}
        case Gemm():
            return {
                "step": "gemm",
                "name": step.name,
                "what": step.what,
                "m": step.m,
                "k": step.k,
                "n": step.n,
                "count": step.count,
                "flops": step.flops,
                "bytes": count_moved_bytes(op, step, setting.dtype),
                "flops_per_byte": derive_intensity(op, step, setting.dtype),
                **_build_format_record(op, step, setting),
                "tile_fill": derive_tile_fill(step),
                "tile_problems": [problem._asdict() for problem in list_tile_problems(step)],
            }


def _build_format_record(op: Op, gemm: Gemm, setting: Setting) -> Record:
    """In which formats a GEMM of a linear reads, sums and writes; any other reads what is computed."""
    factors = [asdict(factor) for factor in list_factors(op, gemm.what, setting.dtype)] if op.parameters else None
    return {"reads": factors, "summed_in": derive_accumulator(setting.dtype), "result": setting.dtype}
