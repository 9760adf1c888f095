"""What the sections of a run must satisfy together."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from plait.config.axis.context import list_context_conflicts, list_document_conflicts
from plait.config.axis.pipeline import PipelineConfig, list_pipeline_conflicts
from plait.config.data import DataConfig
from plait.config.hf.checkpoint import CheckpointModel
from plait.config.model import GptConfig, LlamaConfig
from plait.config.overlap import OverlapConfig
from plait.config.parallel import ParallelConfig, list_axis_conflicts
from plait.config.quantization import QuantizationConfig
from plait.config.section import Problem
from plait.config.train import TrainConfig
from plait.errors import ShardingError
from plait.sharding import Columns, Cut, KeyValueHeads, QueryHeads

AnyModel = LlamaConfig | GptConfig | CheckpointModel


def list_conflicts(sections: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems between the sections that are there, so that those of valid ones show beside an invalid one."""
    for names, rule in _RULES.items():
        if all(name in sections for name in names):
            yield from rule(*(sections[name] for name in names))


def _list_degree_conflicts(model: AnyModel, parallel: ParallelConfig) -> Iterator[Problem]:
    """Every rank must hold a part of every layer."""
    heads = QueryHeads(model.num_heads, model.num_kv_heads, model.head_width)
    query = model.num_heads * model.head_width
    cuts: dict[str, tuple[int, Cut]] = {"layers.*.attention.wq [N*H, D]": (query, heads)}
    if model.mlp_width is not None:
        cuts["layers.*.mlp.w_up [F, D]"] = (model.mlp_width, Columns())
    cuts["embedding and head [V, D]"] = (model.vocab_size, Columns())
    most = min(model.num_heads, model.mlp_width or model.num_heads, model.vocab_size)
    for what, (size, cut) in cuts.items():
        try:
            cut.build_split(size, parallel.tp)
        except ShardingError as error:
            yield Problem("parallel.tp", f"{what}: {error.message}", f"use a degree of at most {most}")


def _list_schedule_conflicts(train: TrainConfig) -> Iterator[Problem]:
    """The warm-up must be over by the last step."""
    if train.warmup_steps > train.steps:
        yield Problem("train.warmup_steps", f"is more than train.steps = {train.steps}")


def _list_compile_conflicts(model: AnyModel, train: TrainConfig, quantization: QuantizationConfig) -> Iterator[Problem]:
    """What is not compiled is refused before anything is built."""
    if train.compile and quantization.resolved is not None:
        yield Problem(
            "train.compile",
            f"quantized linears are not compiled, and quantization.recipe is {quantization.recipe!r}",
            "leave one of them out",
        )
    if train.compile and isinstance(model, CheckpointModel):
        yield Problem("train.compile", "blocks of a Hugging Face model are not compiled", "set train.compile = false")


def _list_recompute_conflicts(model: AnyModel, pipeline: PipelineConfig, train: TrainConfig) -> Iterator[Problem]:
    """A compiler decides by itself what its graphs keep; of a Hugging Face model the core of attention is no module."""
    if train.recompute != "none" and pipeline.schedule == "zero_bubble":
        yield Problem(
            "train.recompute",
            f"is {train.recompute!r}, and pipeline.schedule is 'zero_bubble', whose two halves of backward would each "
            "compute it again",
            "use another schedule, or none",
        )
    if train.recompute != "none" and train.compile:
        yield Problem(
            "train.recompute",
            f"is {train.recompute!r}, and train.compile is set: what a compiled block keeps is the compiler's choice",
            "leave one of them out",
        )
    if train.recompute == "selective" and isinstance(model, CheckpointModel):
        yield Problem(
            "train.recompute",
            "is 'selective', and the core of attention of a Hugging Face model is no module of its own",
            'set train.recompute = "full"',
        )


def _list_length_conflicts(model: AnyModel, train: TrainConfig) -> Iterator[Problem]:
    """Positions beyond the model's are not defined."""
    if train.seq_len is not None and train.seq_len > model.max_seq_len:
        yield Problem("train.seq_len", f"is more than model.max_seq_len = {model.max_seq_len}")


def _list_end_conflicts(model: AnyModel, data: DataConfig | None) -> Iterator[Problem]:
    """An id that no document can end with would make one document of all of them."""
    if data is not None and data.end_of_text_id is not None and data.end_of_text_id >= model.vocab_size:
        yield Problem(
            "data.end_of_text_id", f"is no token of the model, which has model.vocab_size = {model.vocab_size}"
        )


def _list_token_conflicts(model: AnyModel, parallel: ParallelConfig, train: TrainConfig) -> Iterator[Problem]:
    """Under sequence parallelism every rank must hold a token."""
    tokens = _count_tokens(model, train, parallel.cp)
    if parallel.sequence_parallel and 0 < tokens < parallel.tp:  # none at all is said of parallel.cp
        yield Problem(
            "parallel.tp",
            f"{tokens} tokens of a micro-batch cannot be sharded over {parallel.tp} ranks: a rank would have none",
            "set parallel.sequence_parallel = false, or give a micro-batch more tokens",
        )


def _list_chunk_conflicts(
    model: AnyModel,
    parallel: ParallelConfig,
    overlap: OverlapConfig,
    train: TrainConfig,
    quantization: QuantizationConfig,
) -> Iterator[Problem]:
    """A piece has at least one token, or as many as share a scale."""
    recipe = quantization.resolved
    unit, what = (1, "") if recipe is None or recipe.token_unit == 1 else (recipe.token_unit, " in whole blocks")
    tokens = _count_tokens(model, train, parallel.cp)
    fewest = tokens // unit // parallel.tp
    if parallel.tp == 1 or overlap.policy == "disabled" or overlap.chunks == "auto" or not fewest:
        return
    if overlap.chunks > fewest:
        yield Problem(
            "overlap.chunks",
            f"a rank has {fewest * unit} of the {tokens} tokens of a micro-batch (parallel.tp = {parallel.tp}), "
            f"which cannot be cut into {overlap.chunks} pieces{what and f'{what} of {unit}'}",
            f'use at most {fewest}, or "auto"',
        )


def _list_kept_conflicts(model: AnyModel, quantization: QuantizationConfig) -> Iterator[Problem]:
    """Something is quantized."""
    kept = quantization.keep_first + quantization.keep_last
    if quantization.resolved is not None and kept >= model.num_layers and not quantization.head:
        yield Problem(
            "quantization.recipe",
            f"quantizes nothing: of {model.num_layers} blocks the first {quantization.keep_first} and the last "
            f"{quantization.keep_last} are kept in high precision",
            "lower quantization.keep_first and quantization.keep_last",
        )


def list_block_conflicts(
    model: AnyModel, parallel: ParallelConfig, quantization: QuantizationConfig
) -> Iterator[Problem]:
    """Features that share a scale stay on one rank."""
    recipe = quantization.resolved
    if recipe is None or recipe.feature_unit == 1:
        return
    unit = recipe.feature_unit
    if model.width % unit:
        text = f"has blocks of {unit} features, which model.width = {model.width} is no whole number of"
        yield Problem("quantization.recipe", text, "use a recipe without blocks, fp8_currentscaling")
    for what, (size, cut) in _list_quantized_cuts(model, quantization, unit).items():
        torn = _describe_tear(size, cut, parallel.tp, unit)
        if torn is not None:
            yield Problem("quantization.recipe", f"{what}: {torn}", _list_ways_out(what, is_whole=size % unit == 0))


def _list_ways_out(what: str, *, is_whole: bool) -> str:
    """For a dim that some degree cuts into blocks, or none does."""
    ways = ["use a recipe without blocks"]
    if is_whole:
        ways.append("a degree that leaves whole blocks on every rank")
    if ".attention." in what:
        ways.append("quantization.layers = mlp_only")
    if what.startswith("head "):
        ways.append("quantization.head = false")
    return ", or ".join(ways)


def _list_quantized_cuts(model: AnyModel, quantization: QuantizationConfig, unit: int) -> dict[str, tuple[int, Cut]]:
    """The dims of quantized weights that are cut: columns of an MLP in whole blocks, heads as they are."""
    heads = (model.num_heads, model.num_kv_heads, model.head_width)
    cuts: dict[str, tuple[int, Cut]] = {}
    if quantization.layers == "all":
        cuts["layers.*.attention.wq [N*H, D]"] = (model.num_heads * model.head_width, QueryHeads(*heads))
        cuts["layers.*.attention.wk [K*H, D]"] = (model.num_kv_heads * model.head_width, KeyValueHeads(*heads))
    if model.mlp_width is not None:
        cuts["layers.*.mlp.w_up [F, D]"] = (model.mlp_width, Columns(unit))
    if quantization.head:
        cuts["head [V, D]"] = (model.vocab_size, Columns())
    return cuts


def _describe_tear(size: int, cut: Cut, degree: int, unit: int) -> str | None:
    """What keeps a cut from leaving whole blocks on every rank; what keeps it from being one is said elsewhere."""
    if size % unit:
        return f"{size} features are no whole number of blocks of {unit}"
    try:
        split = cut.build_split(size, degree)
    except ShardingError as error:
        return error.message if cut == Columns(unit) else None
    torn = split.find_torn(unit)
    return None if torn is None else f"one of {degree} ranks would have features {torn}, cut within a block of {unit}"


def list_unit_conflicts(
    model: AnyModel, parallel: ParallelConfig, quantization: QuantizationConfig, train: TrainConfig
) -> Iterator[Problem]:
    """Tokens that share a scale stay on one rank; wgrad contracts tokens, so training needs whole blocks of them."""
    recipe = quantization.resolved
    if recipe is None or recipe.token_unit == 1:
        return
    tokens, unit = _count_tokens(model, train), recipe.token_unit
    if tokens % unit:
        yield Problem(
            "quantization.recipe",
            f"has blocks of {unit} tokens for wgrad, which the {tokens} of a micro-batch are no whole number of",
            f"make train.micro_batch_size times train.seq_len a multiple of {unit}",
        )
    elif parallel.sequence_parallel and tokens // unit < parallel.tp <= tokens:
        yield Problem(
            "parallel.tp",
            f"{tokens} tokens of a micro-batch are {tokens // unit} blocks of {unit} (quantization.recipe = "
            f'"{quantization.recipe}"), which cannot be cut over {parallel.tp} ranks: a rank would have none',
            "set parallel.sequence_parallel = false, or give a micro-batch more tokens",
        )


def _count_tokens(model: AnyModel, train: TrainConfig, cp: int = 1) -> int:
    """Tokens of a micro-batch, those of the context-parallel rank that has fewest."""
    return train.micro_batch_size * ((train.seq_len or model.max_seq_len) // cp)


_RULES: dict[tuple[str, ...], Callable[..., Iterator[Problem]]] = {
    ("parallel",): list_axis_conflicts,
    ("train",): _list_schedule_conflicts,
    ("model", "parallel"): _list_degree_conflicts,
    ("model", "train"): _list_length_conflicts,
    ("model", "pipeline", "train"): _list_recompute_conflicts,
    ("model", "parallel", "train"): _list_token_conflicts,
    ("model", "parallel", "pipeline", "quantization", "train"): list_pipeline_conflicts,
    ("model", "train", "quantization"): _list_compile_conflicts,
    ("model", "quantization"): _list_kept_conflicts,
    ("model", "parallel", "quantization"): list_block_conflicts,
    ("model", "parallel", "context", "train", "quantization"): list_context_conflicts,
    ("model", "data"): _list_end_conflicts,
    ("data", "train"): list_document_conflicts,
    ("model", "parallel", "quantization", "train"): list_unit_conflicts,
    ("model", "parallel", "overlap", "train", "quantization"): _list_chunk_conflicts,
}
