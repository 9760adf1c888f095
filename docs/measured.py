"""What the benchmarks measured, from their JSON: the README's result, and the page with all of them."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
LIBRARY = "library"
SHOWN = "mlp-2048"
"""The workload of the slow link that the README shows."""
SMALL, LARGE = ("block-64", "block-128", "block-256"), ("block-1024", "ends-1024")
OURS = "plait"

Record = Mapping[str, Any]


def _build_overhead_result() -> str:
    """What `host_overhead.py` measured."""
    record = _load("host_overhead")
    block = record["block"]
    rows = ["| | unsharded | plait adds | DTensor adds | ratio |", "|---|--:|--:|--:|--:|"]
    for title, mode in (("sequence parallel", "sequence_parallel"), ("all-reduce mode", "all_reduce")):
        result = record["results"]["stubbed"][mode]
        times = (result["time_s"]["unsharded"], result["overhead_s"]["plait"], result["overhead_s"]["dtensor"])
        cells = " | ".join(f"{1e6 * time_s:.0f} us" for time_s in times)
        rows.append(f"| {title} | {cells} | {result['overhead_ratio']['median']:.2f} |")
    return (
        f"Host overhead of one Llama block at tp {block['tp']}, forward and backward, against DTensor's "
        f"`parallelize_module`: a block so small ({block['tokens']} tokens, width {block['width']}) that only the "
        "host's work is left, collectives stubbed.\n\n" + "\n".join(rows) + "\n\n"
        f"Medians of {record['rounds']} interleaved rounds, {_describe(record['machine'])}, "
        "[host_overhead.json](../../benchmarks/host_overhead.json).\n"
    )


def build_readme_result() -> str:
    """One workload over a slow link, at every ratio."""
    case = _load("slow_link")["results"][SHOWN]
    rows = [
        "| communication / computing | best exposed | `overlap=full` | gain | of the ideal |",
        "|--:|--:|--:|--:|--:|",
    ]
    for entry in case["ratios"].values():
        exposed = entry["exposed_s"][entry["best_exposed"]]["median"]
        run = entry["overlapped"]["full transport=ring"]
        rows.append(
            f"| {entry['communication_over_compute']:.2f} | {exposed:.2f} s | {run['time_s']['median']:.2f} s | "
            f"{run['gain']['median']:.2f} | {run['fraction_of_schedule']['median']:.0%} |"
        )
    return (
        f"Overlap over a real slow link, everything left to the cost model: an MLP of {case['tokens']} tokens, width "
        f"{case['width']} x {case['mlp_width']}, float32, forward and backward on {case['tp']} ranks that are "
        f"joined by "
        "a rate-limited link, against the faster of the library's collectives and serial point to point. The "
        "ideal is the larger "
        "of computing and communication, and what the schedule must expose at its head and tail.\n\n"
        + "\n".join(rows)
        + f"\n\nMedians of interleaved rounds, {_describe(case['machine'])}; "
        "[all results](docs/reference/benchmarks.md).\n"
    )


def _build_same_host_summary() -> str:
    """The Llama blocks, as multiples of the same local work without communication."""
    items = _load("same_host")["items"]
    rows = [
        "| Llama block, hidden | plait | best of the others, between processes | times as fast |",
        "|--:|--:|--:|--:|",
    ]
    for name in (*SMALL, LARGE[0]):
        item = items[name]
        ours, best = item["peers"][item["best_plait"]], item["best_library_between_processes"]
        rows.append(
            f"| {name.rpartition('-')[2]} | {_time(ours)} | {best['name']} {_time(item['peers'][best['name']])} | "
            f"{best['over_plait']:.2f} |"
        )
    return (
        "On one host, two ranks over shared memory, forward and backward, beside DTensor, transformers, torchtitan, "
        "Megatron-Core, fairscale, DeepSpeed and JAX; in brackets the multiple of the same local work with no "
        "communication.\n\n"
        + "\n".join(rows)
        + f"\n\nMedians of interleaved rounds, {_describe(items[LARGE[0]]['machine'])}.\n"
    )


def build_benchmarks_page() -> str:
    """Every result."""
    overhead = ["## Host overhead\n", _build_overhead_result()]
    return "\n".join(
        [
            "# Benchmarks\n",
            *_list_slow_link(),
            *_list_same_host(),
            *_list_context(),
            *_list_precision(),
            *_list_hf(),
            *overhead,
            *_list_pipeline(),
            *_list_recompute(),
            *_list_checkpoint(),
            *_list_soak(),
            *_list_seed_case(),
        ]
    )


def _list_slow_link() -> Iterator[str]:
    yield (
        "## Over a slow link\n\n`benchmarks/slow_link.py` (root): ranks in network namespaces joined by "
        "rate-limited links. Gain: "
        "the faster of the library's collectives and serial point to point over the overlapped run. Limit: the "
        "larger of computing "
        "and communication, each measured alone, and what the schedule must expose at its head and tail. `auto` "
        "is also shown "
        "against `disabled`, the library's collectives. Workloads named `sleep` have GEMMs that sleep as long "
        "as a device of the "
        "given rate would compute, for more ranks than cores.\n"
    )
    for name, case in _load("slow_link")["results"].items():
        rate = case["sleeping_gemm_flops_per_s"]
        what = "" if rate is None else f", GEMMs sleep at {rate / 1e9:.0f} GFLOP/s"
        yield (
            f"### {name}\n\n{case['tokens']} tokens, width {case['width']}, MLP width {case['mlp_width']}, "
            f"{case['dtype']}, {case['tp']} ranks{what}; {_describe(case['machine'])}.\n"
        )
        rows = ["| ratio | way | time | gain | of the limit | of the larger | waits |", "|--:|---|--:|--:|--:|--:|--:|"]
        for entry in case["ratios"].values():
            rows += _list_ratio(entry)
        yield "\n".join(rows) + "\n"


def _list_ratio(entry: Record) -> Iterator[str]:
    ratio = f"{entry['communication_over_compute']:.2f}"
    yield f"| {ratio} | computing alone | {entry['compute_s']['median']:.3f} s | | | | |"
    yield f"| | communication alone | {entry['communication_s']:.3f} s | | | | |"
    for way, spread in entry["exposed_s"].items():
        yield f"| | {way}, exposed | {spread['median']:.3f} s | | | | |"
    for way, run in entry["overlapped"].items():
        time_s = run["time_s"]["median"]
        note = ""
        if way.startswith("auto"):
            note = f" ({entry['exposed_s'][LIBRARY]['median'] / time_s:.2f} over `disabled`)"
        yield (
            f"| | `{way}`{note} | {time_s:.3f} s | {run['gain']['median']:.2f} | "
            f"{run['fraction_of_schedule']['median']:.3f} | {run['limit']['max_s'] / time_s:.3f} | "
            f"{run['exposed_s']:.3f} s |"
        )


def _list_same_host() -> Iterator[str]:
    yield (
        "## On one host\n\n`benchmarks/same_host.py`: two ranks, peers interleaved in shuffled rounds. "
        "`compute_only` is the same "
        "local work with nothing communicated. [How each peer is run](../../benchmarks/peers/README.md).\n"
    )
    yield _build_same_host_summary()
    for name, item in _load("same_host")["items"].items():
        yield f"### {name}\n\n{_describe(item['machine'])}, load {item['machine']['load_average']:.1f} before.\n"
        rows = ["| peer | median | over compute_only | by least times |", "|---|--:|--:|--:|"]
        for peer, each in sorted(item["peers"].items(), key=lambda pair: float(pair[1]["median_s"])):
            rows.append(
                f"| {peer} | {1e3 * each['median_s']:.2f} ms | {each['over_compute_only']:.2f} | "
                f"{each['least_over_compute_only']:.2f} |"
            )
        rows += [f"| {peer} | failed: {why} | | |" for peer, why in item["failed"].items()]
        yield "\n".join(rows) + "\n"


def _list_context() -> Iterator[str]:
    """Attention over context ranks, by sequence length."""
    record = _load("context_parallel")
    yield (
        "## Attention over context ranks\n\n`benchmarks/context_parallel.py` (root): one causal attention, forward and "
        f"backward, {record['num_heads']} heads over {record['num_kv_heads']} of width {record['head_width']}, "
        f"{record['dtype']}, on {record['cp']} ranks joined by a link of {record['link_bytes_per_s'] / 1e6:.0f} MB/s: "
        f"at {record['balanced_at']} tokens what an all-gather moves takes as long as computing. Medians of "
        f"{record['rounds']} interleaved rounds, {_describe(record['machine'])}; MB are those of the first rank.\n"
    )
    ways = list(next(iter(record["lengths"].values()))["ways"])
    rows = ["| tokens | " + " | ".join(ways) + " |", "|--:" * (len(ways) + 1) + "|"]
    for length, entry in record["lengths"].items():
        cells = [
            f"{way['time_s']['median']:.3f} s, {sum(way['sent_bytes']) / 1e6:.1f} MB"
            for way in (entry["ways"][name] for name in ways)
        ]
        rows.append(f"| {length} | {' | '.join(cells)} |")
    yield "\n".join(rows) + "\n"
    yield (
        "What each rank computes with all keys at hand, and the busiest over the mean: measured, and counted in score "
        "elements before anything runs.\n"
    )
    rows = ["| tokens | order | computing, by rank | busiest / mean | counted |", "|--:|---|--:|--:|--:|"]
    for length, entry in record["lengths"].items():
        for name, order in entry["orders"].items():
            times = ", ".join(f"{each:.3f} s" for each in order["compute_s"])
            counted = entry["ways"][f"ring {name}"]["counted_imbalance"]
            rows.append(f"| {length} | {name} | {times} | {order['imbalance']:.3f} | {counted:.3f} |")
    yield "\n".join(rows) + "\n"


def _list_precision() -> Iterator[str]:
    """What recipes cost in accuracy, what they gain over a link, and what quantizing takes."""
    curves = _load("quantization_curves")
    steps = len(next(iter(curves["losses"].values())))
    yield (
        f"## Precision recipes\n\n`benchmarks/quantization_curves.py`: {steps} steps of `{curves['config']}` with "
        f"{', '.join(curves['overrides'])}, on {curves['tp']} ranks, the same weights and data. The loss is the mean "
        "of the last steps, the gap is to float32 in nats; float32 from another seed says what of it is chance. "
        "Emulated on CPUs, in the same numbers that an instruction would multiply.\n"
    )
    rows = ["| run | final loss | gap |", "|---|--:|--:|"]
    rows += [f"| {name} | {run['final_loss']:.3f} | {run['gap']:+.3f} |" for name, run in curves["results"].items()]
    yield "\n".join(rows) + "\n"
    yield "![Training loss under every recipe](../images/quantization_curves.png)\n"
    yield from _list_precision_link()
    yield from _list_quantizing()


def _list_precision_link() -> Iterator[str]:
    record = _load("quantization_link")
    yield (
        f"`benchmarks/quantization_link.py`: an MLP of {record['tokens']} tokens, width {record['width']} x "
        f"{record['mlp_width']}, forward and backward on {record['tp']} ranks that are joined by a rate-limited link, "
        f"overlapped ({record['way']}). GEMMs sleep for as long in every format; quantizing and decoding are in the "
        "times, and take a CPU what computing took longer than in float32. Sums are carried in float32 in the first "
        "row, in bfloat16 in all others.\n"
    )
    ratios = list(record["ratios"])
    titles = " | ".join(f"ratio {ratio}: computing, overlapped, gain" for ratio in ratios)
    rows = [f"| | bytes sent | predicted | {titles} |", "|---|--:|--:" + "|--:" * len(ratios) + "|"]
    for name, sent in record["sent_bytes"].items():
        cells = [
            f"{each['compute_s']['median']:.2f} s, {each['overlapped_s']['median']:.2f} s, "
            f"{each['gain_over']['float32']['median']:.2f}"
            for each in (entry["formats"][name] for entry in record["ratios"].values())
        ]
        rows.append(f"| {name} | {sent['measured']:,} | {sent['predicted']:,} | {' | '.join(cells)} |")
    yield "\n".join(rows) + f"\n\nMedians of {record['rounds']} rounds, {_describe(record['machine'])}.\n"


def _list_quantizing() -> Iterator[str]:
    record = _load("quantize")
    yield (
        "`benchmarks/quantize.py`: time per element of a float32 matrix, and per orientation, beside copying it; "
        "`measure` finds the largest magnitude.\n"
    )
    for place, case in record["results"].items():
        rows = [f"| {place}, {case['shape']} | ns | times the copy |", "|---|--:|--:|"]
        copy_s = case["element_s"]["copy"]["median"]
        for act, time_s in case["element_s"].items():
            rows.append(f"| {act} | {1e9 * time_s['median']:.2f} | {time_s['median'] / copy_s:.1f} |")
        yield "\n".join(rows) + "\n"
    yield f"Medians of {record['rounds']} rounds, {_describe(record['machine'])}.\n"


def _list_pipeline() -> Iterator[str]:
    record = _load("pipeline_bubble")
    yield (
        "## The bubble of a pipeline\n\n`benchmarks/pipeline_bubble.py`: processes that send each other real tensors "
        "by torch's schedules, through plait's stages, with sleeps in the place of what they compute "
        f"({record['forward_s'] * 1e3:.0f} ms forward and {record['backward_s'] * 1e3:.0f} ms backward of a rank for a "
        "micro-batch, half of backward for the gradients of weights). The bubble is the share of a step in which ranks "
        "are not at work, the mean of all ranks; planned is that of the same order of work on a clock on which messages"
        " and the host take no time, as `plait explain` and the planner have it.\n"
    )
    rows = [
        "| schedule | stages a rank | ranks | micro-batches | bubble | range | planned |",
        "|---|--:|--:|--:|--:|---|--:|",
    ]
    for found in record["results"].values():
        least, most = found["bubble_range"]
        rows.append(
            f"| {found['schedule']} | {found['stages_per_rank']} | {found['pp']} | {found['num_micro_batches']} | "
            f"{found['bubble']:.1%} | {least:.1%} to {most:.1%} | {found['planned_bubble']:.1%} |"
        )
    machine = record["machine"]
    yield "\n".join(rows) + "\n"
    yield (
        f"Medians and range of {record['rounds']} steps, {_describe(machine)}; other work on the machine at the start: "
        f"a load of {machine['load_average']:.1f}.\n"
    )


def _list_hf() -> Iterator[str]:
    record = _load("hf")
    millions = record["model"]["num_parameters"] / 1e6
    yield (
        f"## Beside transformers' own tensor parallelism\n\n`benchmarks/hf.py`: a Llama of {millions:.0f} million "
        f"parameters in {record['model']['dtype']}, {record['tp']} ranks on one host, `overlap={record['overlap']}`, "
        "in turns with `AutoModelForCausalLM.from_pretrained(..., distributed_config=DistributedConfig("
        'tp_plan="auto"))`. Memory is by how much the resident memory of a rank grows at most, pages of mapped files '
        "included. Both give the same loss, and the same tokens.\n"
    )
    rows = ["| | plait | transformers | transformers / plait |", "|---|--:|--:|--:|"]
    results = record["results"]
    for what, found in (
        ("load, every weight read", results["loading"]),
        (f"forward and backward, {record['num_tokens']} tokens", results["step"]),
    ):
        rows.append(_compare(f"{what}: time", found, "time_s", "{:.2f} s"))
        rows.append(_compare(f"{what}: memory", found, "peak_bytes", "{:.0f} MB", 1e-6))
    for batch, found in results["decode"].items():
        what = f"{batch} x {record['prompt_tokens']} tokens read, {record['new_tokens']} generated"
        rows.append(_compare(what, found, "time_s", "{:.2f} s"))
        rows.append(_compare(f"{what}: tokens/s", found, "tokens_per_s", "{:.1f}"))
    yield "\n".join(rows) + f"\n\nMedians of {record['rounds']} rounds, {_describe(record['machine'])}.\n"


def _compare(what: str, found: Record, key: str, form: str, scale: float = 1.0) -> str:
    ours, theirs = found["plait"][key], found["transformers"][key]
    return f"| {what} | {form.format(scale * ours)} | {form.format(scale * theirs)} | {theirs / ours:.2f} |"


def _list_recompute() -> Iterator[str]:
    record = _load("recompute")
    size = record["model"]
    yield (
        "## Computing blocks again\n\n`benchmarks/recompute.py`: one micro-batch forward and backward of "
        f"{size['layers']} blocks of width {size['width']}, {size['batch']} x {size['seq_len']} tokens, float32, "
        f"{record['tp']} ranks on one host. Kept is what a block holds between forward and backward, at most is what "
        "tensors take beside parameters and gradients; planned is what `plait plan` counts.\n"
    )
    for name, modes in record["results"].items():
        rows = [
            f"| {name} | a block keeps | planned | at most | planned | FLOPs of a block | step |",
            "|---|--:|--:|--:|--:|--:|--:|",
        ]
        plain = modes["none"]
        for mode, found in modes.items():
            cells = [f"{1e-6 * found[key][of]:.2f} MB" for key in ("block_bytes", "peak_bytes") for of in _BOTH]
            flops, time_s = found["block_flops"] / plain["block_flops"], found["step_s"]["median"]
            ratio = time_s / plain["step_s"]["median"]
            rows.append(f"| {mode} | {' | '.join(cells)} | x {flops:.2f} | {time_s:.2f} s, x {ratio:.2f} |")
        yield "\n".join(rows) + "\n"
    yield f"Medians of {record['rounds']} rounds, {_describe(record['machine'])}.\n"


_BOTH = ("measured", "planned")


def _list_checkpoint() -> Iterator[str]:
    record = _load("checkpoint")
    model, result, ranks = record["model"], record["results"], record["model"]["tp"]
    step_s = result["modes"]["none"]["step_s"]
    yield (
        f"## Checkpoints\n\n`benchmarks/checkpoint.py`: parameters and both moments of {model['layers']} blocks of "
        f"width {model['width']}, {result['checkpoint_bytes'] / 1e6:.0f} MB from {ranks} ranks to one disk. Stall "
        f"is by how much longer {record['steps']} steps, of {step_s:.2f} s each, take with a save in them, until all "
        "of it is on disk; call is how long the first of them waits for it. torch is `dcp.save` and `dcp.async_save` "
        f"of the same bytes, without sums of the files. Medians of {record['rounds']} interleaved rounds, "
        f"{_describe(record['machine'])}.\n"
    )
    rows = ["| | stall | call | saved after | loaded in |", "|---|--:|--:|--:|--:|"]
    for mode in ("plait", "torch", "plait_async", "torch_async"):
        entry = result["modes"][mode]
        cells = (f"{entry[key]:.2f} s" if key in entry else "" for key in ("stall_s", "call_s", "save_s", "load_s"))
        rows.append(f"| {mode} | {' | '.join(cells)} |")
    yield "\n".join(rows) + "\n"


def _list_soak() -> Iterator[str]:
    record = _load("soak")
    files = ", ".join(record["same_files"])
    yield (
        f"## Ranks that are killed\n\n`benchmarks/soak.py`: {record['what']}. A small Llama on real text, "
        f"{record['tp']} ranks, {record['steps']} steps with a checkpoint every {record['checkpoint_every']}, "
        "beside the same run without kills.\n"
    )
    rows = [
        "| | |",
        "|---|--:|",
        f"| kills | {record['kills']} |",
        f"| of them while the ranks started | {record['kills_in_start_up']} |",
        f"| restarts, all by themselves | {record['restarts']} |",
        f"| steps that were done again | {record['steps_repeated']} |",
        f"| half-written files, named shared memory left | {len(record['left_behind'])} |",
        f"| final loss | {record['final_loss']:.4f} |",
        f"| losses and gradient norms of all steps equal bit for bit | {'yes' if record['same_losses'] else 'no'} |",
        f"| last checkpoint ({files}) equal byte for byte | {'yes' if all(record['same_files'].values()) else 'no'} |",
    ]
    yield "\n".join(rows) + f"\n\n{_describe(record['machine'])}.\n"


def _list_seed_case() -> Iterator[str]:
    record = _load("seed_case")
    yield "## A published case on paper\n\n`benchmarks/seed_case.py`: " + record["what"] + "\n"
    yield "\n".join(f"* {reading}" for reading in record["reading"]) + "\n"
    yield "Assumptions:\n"
    yield "\n".join(f"* {assumption}" for assumption in record["assumptions"]) + "\n"


def _load(name: str) -> Record:
    record: Record = json.loads((BENCHMARKS / f"{name}.json").read_text())
    return record


def _describe(machine: Record) -> str:
    cores = f", {machine['cores']} cores" if "cores" in machine else ""
    return f"{machine['cpu']}{cores}, one thread a rank, torch {machine['torch'].partition('+')[0]}, {machine['date']}"


def _time(peer: Record) -> str:
    return f"{1e3 * peer['median_s']:.2f} ms ({peer['over_compute_only']:.2f})"
