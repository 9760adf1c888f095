import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from plait.cli.explain.show import Heading, Table, print_all
from plait.cli.main import main
from plait.units import format_bytes

Explain = Callable[..., str]

MOVES = ("send", "recv", "all_gather", "reduce_scatter", "all_to_all")


@pytest.fixture
def explain(capsys: pytest.CaptureFixture[str]) -> Explain:
    """What `plait explain` prints on stdout; nothing may be on stderr."""

    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as caught:
            main(["explain", *arguments])
        out, err = capsys.readouterr()
        assert (caught.value.code, err) == (0, "")
        return out

    return run


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str]) -> Explain:
    """What `plait explain` complains about: status 2, nothing on stdout."""

    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as caught:
            main(["explain", *arguments])
        out, err = capsys.readouterr()
        assert (caught.value.code, out) == (2, "")
        return err

    return run


def find_rows(text: str, first: str) -> list[list[str]]:
    """The cells of the lines that begin with the cell `first`."""
    lines = ([cell for cell in line.strip().split("  ") if cell] for line in text.splitlines())
    return [[cell.strip() for cell in cells] for cells in lines if cells and cells[0].strip() == first]


class TestLinear:
    def test_the_exercise_of_the_lesson(self, explain: Explain) -> None:
        out = explain("linear", "8192x8192x32768", "--degrees", "1,2,4,8")
        column, replicated, sharded, row, *_ = find_rows(out, "4")
        assert column == ["4", "[8192, 8192]", "0:8192 .. 24576:32768", "1.10 TFLOP", "2.20 TFLOP", "2731", "ok"]
        assert replicated == ["4", "[8192, 8192]", "[8192, 8192]", "-", "all_reduce dX", "134 MB", "201 MB"]
        assert sharded[1:5] == ["[2048, 8192]", "[8192, 8192]", "all_gather X", "all_gather X, reduce_scatter dX"]
        assert row[:3] == ["4", "[2048, 32768]", "0:2048 .. 6144:8192"]

    def test_both_layouts_of_either_cut_are_shown_unless_declared(self, explain: Explain) -> None:
        titles = [line for line in explain("linear", "64x64x64", "--degrees", "2").splitlines() if "->" in line]
        assert titles == [
            "column parallel, X replicated -> Y feature-sharded",
            "column parallel, X token-sharded -> Y feature-sharded",
            "row parallel, X feature-sharded -> Y replicated",
            "row parallel, X feature-sharded -> Y token-sharded",
        ]

    def test_declared_layouts_decide_the_collectives(self, explain: Explain) -> None:
        declared = ("--input", "token-sharded", "--output", "replicated")
        out = explain("linear", "64x64x64", "--degrees", "2", *declared)
        _, column, _, row = find_rows(out, "2")
        assert column[3:5] == ["all_gather X, all_gather Y", "all_gather X, reduce_scatter dX"]
        assert row[3:5] == ["all_to_all X, all_reduce Y", "all_to_all dX"]

    def test_a_narrow_shard_is_told_with_the_reason(self, explain: Explain) -> None:
        out = explain("linear", "8192x8192x32768", "--degrees", "3,512")
        assert "tp 512: 64 is below the 128 of a tile (forward n, wgrad m)" in out
        assert "tp 3: 10923 is not a multiple of 64 (forward n, dgrad k, wgrad m)" in out

    def test_json_has_every_rank_of_every_case(self, explain: Explain) -> None:
        record = json.loads(explain("linear", "7x24x36", "--degrees", "1,3", "--dtype", "float32", "--json"))
        assert [record[key] for key in ("m", "k", "n", "dtype")] == [7, 24, 36, "float32"]
        assert [(case["cut"], case["input"], case["output"], case["tp"]) for case in record["cases"]] == [
            (*layouts, tp)
            for layouts in (
                ("column", "replicated", "feature-sharded"),
                ("column", "token-sharded", "feature-sharded"),
                ("row", "feature-sharded", "replicated"),
                ("row", "feature-sharded", "token-sharded"),
            )
            for tp in (1, 3)
        ]
        ranks = record["cases"][3]["ranks"]
        assert [rank["inputs"][0]["local_shape"] for rank in ranks] == [[3, 24], [2, 24], [2, 24]]
        assert [rank["parameters"][0]["owns"][0] for rank in ranks] == [[0, 12], [12, 24], [24, 36]]
        assert [step["payload_bytes"] for step in ranks[0]["forward"] if step["step"] == "collective"] == [7 * 24 * 4]

    def test_a_recipe_says_what_travels(self, explain: Explain) -> None:
        """X of 64 MiB numbers: a byte each, and a scale for 32 of them; the gradient in blocks both ways."""
        out = explain("linear", "8192x8192x32768", "--degrees=4", "--quantization=mxfp8")
        assert "mxfp8: input e4m3 block32, weight e4m3 block32, gradient e4m3 block32" in out
        rows = find_rows(out, "4")
        assert rows[2][3:6] == ["all_gather X", "all_gather X, reduce_scatter dX", "2 x 69.2 MB, 134 MB"]
        assert rows[-1][3:6] == ["reduce_scatter Y", "all_gather dY", "537 MB, 554 MB"]
        current = find_rows(explain("linear", "64x64x64", "--degrees=2", "--quantization=fp8_currentscaling"), "2")
        assert current[2][3] == "all_reduce amax, all_gather X"
        record = json.loads(explain("linear", "64x64x64", "--degrees=2", "--quantization=nvfp4", "--json"))
        assert record["quantization"] == "nvfp4"
        assert record["cases"][0]["ranks"][0]["saved"][0]["dtype"] == "uint8"

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["80x64x64"], "M = 80 is no whole number of blocks of 32 (mxfp8)"),
            (["64x48x64"], "K = 48 is no whole number of blocks of 32"),
            (
                ["64x64x64", "--degrees=4"],
                "N = 64 cannot be cut over 4 ranks in blocks of 32\n\nhint: use degrees of at most 2",
            ),
        ],
    )
    def test_blocks_that_cannot_be_cut_are_refused(self, refuse: Explain, arguments: list[str], message: str) -> None:
        assert message in refuse("linear", *arguments, "--quantization=mxfp8")

    @pytest.mark.parametrize("shape", ["8x8", "8x8x8x8", "0x8x8", "8x-1x8", "8x8xn", "8*8*8", "8x8x9999999999", ""])
    def test_a_malformed_shape_is_refused(self, refuse: Explain, shape: str) -> None:
        assert refuse("linear", shape).startswith(
            f'error: "{shape}" is not a shape MxKxN of three positive sizes of at'
        )

    @pytest.mark.parametrize("degrees", ["0", "2,", "a", "1;2", "-2"])
    def test_malformed_degrees_are_refused(self, refuse: Explain, degrees: str) -> None:
        assert refuse("linear", "8x8x8", f"--degrees={degrees}").startswith(
            f'error: --degrees "{degrees}" is not a list'
        )

    def test_a_degree_that_would_take_minutes_to_explain_is_refused(self, refuse: Explain) -> None:
        assert refuse("linear", "99999x99999x99999", "--degrees=1,1025") == (
            "error: --degrees 1025 is more than the 1024 ranks that may share a layer\n"
        )

    def test_a_degree_that_cannot_be_realised_is_refused(self, refuse: Explain) -> None:
        assert "N = 4 cannot be cut over 8 ranks\n\nhint: use degrees of at most 4" in refuse("linear", "64x64x4")


class TestModel:
    def test_a_block_in_both_modes(self, explain: Explain) -> None:
        out = explain("llama3-8b", "--tp", "4", "--block", "0")
        (wq,) = find_rows(out, "wq")
        assert wq == ["wq", "[T/tp, D] -> [T, N*H/tp]", "[1024, 4096]", "all_gather x", "all_gather x", "2 x 67.1 MB"]
        (w_down,) = find_rows(out, "w_down")
        assert w_down[2:] == ["[4096, 3584]", "reduce_scatter y", "all_gather dy", "2 x 67.1 MB"]
        assert find_rows(out, "backward")[-1][1:] == ["4 all_gather, 2 all_reduce, 2 reduce_scatter", "2 all_reduce"]
        assert find_rows(out, "sent") == [["sent", "503 MB", "403 MB"]]
        assert find_rows(out, "F")[0][1:] == ["MLP width", "14336", "0:3584 .. 10752:14336"]
        assert not find_rows(out, "embedding")

    def test_a_model_has_its_ends_and_the_totals_of_a_step(self, explain: Explain) -> None:
        out = explain("llama3-8b", "--tp", "4")
        assert [rows[1] for rows in find_rows(out, "embedding")] == ["[T] -> [T/tp, D]", "[T] -> [T, D]"]
        assert [rows[3] for rows in find_rows(out, "loss")] == ["all_reduce max"] * 2
        assert find_rows(out, "head")[-1][1] == "[8192, 4096] @ [4096, 32064]"
        assert find_rows(out, "parameters") == [["parameters", *["2.01 G (4.02 GB)"] * 2]]
        sequence_parallel = "195 all_gather, 69 all_reduce, 130 reduce_scatter"
        assert find_rows(out, "collectives") == [["collectives", sequence_parallel, "134 all_reduce"]]

    def test_the_mode_of_the_run_comes_first(self, explain: Explain) -> None:
        out = explain("llama-tiny", "--tp", "2", "--block", "1", "parallel.sequence_parallel=false")
        assert out.startswith("llama-tiny, block 1: all-reduce mode, rank 0 of 2")

    def test_one_rank_has_no_modes(self, explain: Explain) -> None:
        out = explain("llama-tiny", "--block", "0")
        assert "not parallel" in out
        assert "all_reduce" not in out

    @pytest.mark.parametrize("axis", ["cp", "dp_shard", "dp_replicate"])
    def test_a_run_on_another_axis_is_not_called_not_parallel(self, explain: Explain, axis: str) -> None:
        out = explain("llama-tiny", f"parallel.{axis}=2")
        assert "not parallel" not in out
        assert out.startswith("llama-tiny: tp = 1, rank 0 of 1")

    def test_overrides_set_the_batch(self, explain: Explain) -> None:
        out = explain("gpt-22b", "--tp", "8", "--block", "0", "train.micro_batch_size=4", "train.seq_len=1024")
        assert "4 x 1024 tokens" in out

    @pytest.mark.parametrize(
        ("overrides", "note"),
        [
            (["train.gradient_accumulation=3"], "a step has 3 micro-batches: 192 tokens"),
            (["parallel.dp_replicate=4"], "a step has 1 micro-batch on each of 4 dp ranks: 256 tokens"),
        ],
    )
    def test_a_step_of_more_than_a_micro_batch_says_so(self, explain: Explain, overrides: list[str], note: str) -> None:
        assert explain("llama-tiny", "--tp", "2", *overrides).splitlines()[-1] == note
        assert "a step has" not in explain("llama-tiny", "--tp", "2")

    def test_the_copy_that_a_save_makes_is_told(self, explain: Explain) -> None:
        text = explain("llama-tiny", "--tp", "2", "train.async_checkpoint=true")
        record = json.loads(explain("llama-tiny", "--tp", "2", "--json"))
        num_parameters = record["modes"][0]["ranks"][0]["step"]["num_parameters"]
        assert f"a save copies {format_bytes(12 * num_parameters)} of a rank to memory of the CPU" in text
        assert "a save copies" not in explain("llama-tiny", "--tp", "2")

    def test_the_rank_with_most_heads_is_shown(self, explain: Explain) -> None:
        """Two KV groups over three ranks: two share the heads of the first, the third has all of the second."""
        assert "rank 2 of 3" in explain("llama-tiny-gqa2", "--tp", "3", "--block", "0")

    @pytest.mark.parametrize(("model", "tp", "busiest"), [("smollm2-135m", 2, 0), ("llama-tiny-gqa2", 3, 2)])
    def test_balance_is_told_where_work_is_uneven(self, explain: Explain, model: str, tp: int, busiest: int) -> None:
        """FIELD 3.23: uneven by whole KV groups, with balance shown."""
        record = json.loads(explain(model, "--tp", str(tp), "--json"))
        flops = [rank["step"]["flops"] for rank in record["modes"][0]["ranks"]]
        assert flops[busiest] == max(flops)
        ratio = max(flops) * tp / sum(flops)
        note = f"rank {busiest} computes {ratio:.2f} times the average of the ranks"
        assert explain(model, "--tp", str(tp)).splitlines()[-1] == note

    def test_even_work_needs_no_note(self, explain: Explain) -> None:
        assert "average" not in explain("llama3-8b", "--tp", "4")

    def test_the_dtype_of_sums_is_told_and_counted(self, explain: Explain) -> None:
        """FIELD 3.18: the reduction dtype is printed; its bytes are those that move."""
        out = explain("llama3-8b", "--tp", "4", "--block", "0", "precision.reduce=float32")
        assert out.splitlines()[0].endswith("bfloat16, sums in float32")
        assert find_rows(out, "wo")[0][-1] == "134 MB, 67.1 MB"

    def test_replicated_heads_are_told(self, explain: Explain) -> None:
        out = explain("llama-tiny-gqa2", "--tp", "4", "--block", "0")
        assert find_rows(out, "K*H")[0][-1] == "0:8 .. 8:16, each on 2 ranks"
        assert [find_rows(out, name)[0][-2] for name in ("wk", "wv")] == ["all_reduce dwk", "all_reduce dwv"]

    def test_json_has_both_modes_and_every_rank(self, explain: Explain) -> None:
        record = json.loads(explain("gpt-tiny", "--tp", "2", "train.gradient_accumulation=3", "--json"))
        assert [mode["sequence_parallel"] for mode in record["modes"]] == [True, False]
        for mode in record["modes"]:
            assert [rank["rank"] for rank in mode["ranks"]] == [0, 1]
            for rank in mode["ranks"]:
                check_rank(rank, record)

    def test_json_of_a_block_has_the_block_alone(self, explain: Explain) -> None:
        record = json.loads(explain("llama-tiny", "--tp", "2", "--block", "1", "--json"))
        assert set(record["modes"][0]["ranks"][0]) == {"rank", "block", "block_totals"}
        assert record["modes"][0]["ranks"][0]["block"][0]["name"] == "layers.1.attention_norm"

    def test_a_recipe_is_explained_by_what_it_reads_sums_and_keeps(self, explain: Explain) -> None:
        out = explain("llama3-8b", "--tp", "8", "--quantization", "fp8_currentscaling")
        assert out.splitlines()[0].endswith("bfloat16, fp8_currentscaling")
        assert "precision: fp8_currentscaling, linears of blocks 1 to 30" in out
        formats = ["e4m3, e4m3", "e5m2, e4m3", "e5m2, e4m3", "float32", "bfloat16", "float32"]
        assert find_rows(out, "w_gate|w_up") == [["w_gate|w_up", *formats]]
        assert find_rows(out, "head")[2] == ["head", *["bfloat16, bfloat16"] * 3, "float32", "bfloat16", "float32"]
        titles = [line for line in out.splitlines() if line.startswith("layers.")]
        assert titles == ["layers.1 to 30: fp8_currentscaling", "layers.0, 31: bfloat16"] * 2

    def test_what_a_recipe_sends_is_told_beside_what_it_saves(self, explain: Explain) -> None:
        """A gather of [8192, 4096]: a byte for two in MXFP8, and one for 32 of them."""
        out = explain("llama3-8b", "--tp", "8", "--quantization=mxfp8")
        gather, again = find_rows(out, "all_gather x")[:2]
        assert gather == ["all_gather x", "forward", "wq|wk|wv", "e4m3", "33.6 MB", "67.1 MB", "32.5 MB"]
        assert again[1] == "backward"
        assert find_rows(out, "e8m0 scales")[0] == ["e8m0 scales", "1.05 MB", "-", "-"]
        assert find_rows(out, "all_gather dy")[0][3:] == ["2 x e4m3", "67.1 MB", "67.1 MB", "-2.10 MB"]
        assert find_rows(out, "reduce_scatter y")[0][3:] == ["bfloat16", "67.1 MB", "67.1 MB", "-"]
        assert find_rows(out, "largest magnitudes") == [["largest magnitudes", "-", "-"]]
        (*_, saved) = find_rows(out, "sent")[-1]
        assert 15 < float(saved.removesuffix("%")) < 20

    def test_magnitudes_and_histories_have_their_lines(self, explain: Explain) -> None:
        out = explain("llama3-8b", "--tp=8", "--quantization=nvfp4")
        assert find_rows(out, "all_reduce amax")[0] == [
            "all_reduce amax",
            "forward",
            "wq|wk|wv",
            "float32",
            "20 B",
            "-",
            "-",
        ]
        assert "wgrad: input and gradient mixed in sixteens of tokens by a random Hadamard matrix" in out
        delayed = explain("llama3-8b", "--tp=8", "--quantization=fp8_delayedscaling")
        assert not find_rows(delayed, "all_reduce amax")
        assert "magnitudes for delayed scales: all_reduce max [630] float32 over tp, once a step" in delayed

    def test_a_block_that_is_kept_is_explained_as_it_is(self, explain: Explain) -> None:
        arguments = ("llama3-8b", "--tp=8", "--quantization=mxfp8")
        assert "precision:" not in explain(*arguments, "--block=0")
        assert find_rows(explain(*arguments, "--block=0"), "wq")[0][-1] == "2 x 67.1 MB"
        assert find_rows(explain(*arguments, "--block=1"), "wq")[0][-1] == "2 x 34.6 MB"

    @pytest.mark.parametrize("recipe", ["fp8_delayedscaling", "mxfp8", "nvfp4"])
    def test_json_says_all_that_is_said_of_a_recipe(self, explain: Explain, recipe: str) -> None:
        arguments = ("llama3-8b", "--tp=2", f"--quantization={recipe}", "train.gradient_accumulation=2")
        record = json.loads(explain(*arguments, "--json"))
        assert record["quantization"]["name"] == recipe
        assert record["quantization"]["kept_blocks"] == [0, 31]
        assert (record["dtype"], record["master_dtype"]) == ("bfloat16", "float32")
        for rank in (rank for mode in record["modes"] for rank in mode["ranks"]):
            quantized = sum(op["totals"]["saved_bytes"] for op in rank["block"])
            kept = sum(op["totals"]["saved_bytes"] for op in rank["kept_block"])
            ends = sum(op["totals"]["saved_bytes"] for op in (*rank["entry"], *rank["exit"], rank["loss"]))
            assert rank["step"]["saved_bytes"] == 30 * quantized + 2 * kept + ends
            steps = [step for op in rank["block"] for step in (*op["forward"], *op["backward"])]
            for step in steps:
                assert ("wire" in step) == (step.get("dtype") == "uint8")
                if "wire" in step:
                    assert step["wire"]["number_bytes"] + step["wire"]["scale_bytes"] == step["payload_bytes"]
            (dgrad,) = (step for step in steps if step.get("what") == "dgrad" and step["name"].endswith("w_down"))
            formats = [record["quantization"][name]["format"] for name in ("gradient", "weight")]
            assert [factor["format"] for factor in dgrad["reads"]] == formats
            assert (dgrad["summed_in"], dgrad["result"]) == ("float32", "bfloat16")
            sent = sum(rank["step"]["sent_bytes"].values())
            assert sent == pytest.approx(rank["step"]["collectives"]["sent_bytes"])

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["llama3-8b", "--quantization", "mxfp9"], "Invalid value for '--quantization'"),
            (["llama-tiny", "--quantization", "mxfp8"], "quantizes nothing: of 2 blocks"),
            (["llama3-9b", "--tp", "2"], 'neither a file nor a preset\n\nhint: did you mean "llama3-8b"'),
            (["llama3-8b", "--tp", "64"], "32 query heads in 8 KV groups of 4 cannot be cut over 64 ranks"),
            (["llama3-8b", "--tp", "0"], "parallel.tp = 0"),
            (["llama3-8b", "--tp", "2.5"], "Invalid value for '--tp'"),
            (["llama3-8b", "--block", "32"], "--block 32 is not a block of llama3-8b\n\nhint: blocks are 0 to 31"),
            (["llama3-8b", "--block", "-1"], "error: --block -1 is not a block"),
            (["llama3-8b", "train.seqlen=4"], "train.seqlen"),
            (["missing.toml"], "missing.toml: there is no such file"),
            ([], "Missing command"),
        ],
    )  # fmt: skip
    def test_bad_input_is_one_error(self, refuse: Explain, arguments: list[str], message: str) -> None:
        assert message in refuse(*arguments)


def check_rank(rank: dict[str, Any], record: dict[str, Any]) -> None:
    """The totals are the sums of what is listed, and JSON says all that a reader of the tables sees."""
    layers, repeats = record["num_layers"], record["gradient_accumulation"]
    ends = [*rank["entry"], *rank["exit"], rank["loss"]]
    totals = rank["micro_batch_totals"]
    for key in ("forward_flops", "backward_flops", "saved_bytes"):
        in_block = sum(op["totals"][key] for op in rank["block"])
        assert rank["block_totals"][key] == in_block
        assert totals[key] == layers * in_block + sum(op["totals"][key] for op in ends)
    steps = [*(op for op in rank["block"] for _ in range(layers)), *ends]
    sent = [step["sent_bytes"] for op in steps for step in (*op["forward"], *op["backward"]) if "sent_bytes" in step]
    once = 2 * [1.0]  # the gradient norm and the totals of the step
    assert sum(rank["step"]["collectives"]["counts"].values()) == repeats * len(sent) + len(once)
    assert rank["step"]["flops"] == repeats * (totals["forward_flops"] + totals["backward_flops"])
    weights = {p["name"]: p["local_shape"] for op in ends for p in op["parameters"]}
    assert "head.weight" not in weights  # tied
    assert rank["step"]["saved_bytes"] == totals["saved_bytes"]


@pytest.mark.parametrize(
    "arguments", [["llama3-8b", "--tp", "4"], ["linear", "64x64x64"], ["gpt2", "--tp", "3", "--json"]]
)
def test_torch_and_numpy_are_never_imported(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from plait.cli.main import main\n"
        "try:\n"
        f"    main({['explain', *arguments]!r})\n"
        "finally:\n"
        "    print({'torch', 'numpy'} & set(sys.modules), file=sys.stderr)\n"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stderr == "set()\n"


def test_a_linear_is_explained_without_pydantic() -> None:
    """Its import alone takes half of the half second in which explain answers."""
    code = "import sys; import plait.cli.explain.linear; print('pydantic' in sys.modules)"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout == "False\n"


class TestTables:
    """Terminals of any width, pipes, no colour."""

    TABLE = Table(("op", "bytes"), right=("bytes",))
    TABLE.add_row("all_gather of the activations", "67.1 MB")
    TABLE.add_row("two\nlines", "8 B\n9 B")

    @pytest.fixture
    def show(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
        def run(part: Table | Heading | str, columns: int | None) -> list[str]:
            monkeypatch.setattr(sys.stdout, "isatty", lambda: columns is not None)
            monkeypatch.setenv("COLUMNS", str(columns))
            print_all([part])
            return capsys.readouterr().out.splitlines()

        return run

    def test_a_pipe_has_no_width(self, show: Callable[..., list[str]]) -> None:
        assert show(self.TABLE, None) == [
            "op                               bytes",
            "\u2500" * 38,
            "all_gather of the activations  67.1 MB",
            "two                                8 B",
            "lines                              9 B",
        ]

    def test_a_narrow_terminal_wraps_between_words(
        self, show: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("NO_COLOR", "1")
        lines = show(self.TABLE, 24)
        assert lines[2:5] == ["all_gather of    67.1 MB", "the activations", "two                  8 B"]
        assert max(map(len, lines)) <= 24

    def test_nothing_is_cut_where_even_words_do_not_fit(self, show: Callable[..., list[str]]) -> None:
        assert "activations" in " ".join(show(self.TABLE, 8))

    def test_the_narrow_form_is_taken_where_there_is_no_room(
        self, show: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("NO_COLOR", "1")
        table = Table(("a long head", "b"), narrow=Table(("a", "b")))
        assert show(table, 80)[0] == "a long head  b"
        assert show(table, 10)[0] == "a  b"

    @pytest.mark.parametrize(("columns", "is_colourless", "expected"), [
        (80, False, "\x1b[1mhead\x1b[0m"),
        (80, True, "head"),
        (None, False, "head"),
    ])  # fmt: skip
    def test_bold_is_for_terminals_with_colour(
        self,
        show: Callable[..., list[str]],
        monkeypatch: pytest.MonkeyPatch,
        columns: int | None,
        is_colourless: bool,
        expected: str,
    ) -> None:
        monkeypatch.delenv("NO_COLOR", raising=False)
        if is_colourless:
            monkeypatch.setenv("NO_COLOR", "1")
        assert show(Heading("head"), columns) == [expected]


@pytest.mark.parametrize(("order", "imbalance"), [("zigzag", 1.0), ("contiguous", 1.5)])
def test_a_context_axis_is_shown_with_its_balance_and_bytes(explain: Explain, order: str, imbalance: float) -> None:
    overrides = ["parallel.cp=2", f"context.order={order}", "train.seq_len=1024", "model.max_seq_len=1024"]
    record = json.loads(explain("model", "llama-tiny", *overrides, "--json"))["context"]
    assert record["imbalance"] == pytest.approx(imbalance, abs=1e-3)
    assert sum(each["visible"] for each in record["ranks"]) == 8 * 1024 * 1025 // 2
    assert any(each["forward_sent_bytes"] for each in record["ranks"])
    assert f"{order} order: the busiest rank has" in explain("model", "llama-tiny", *overrides)


@pytest.mark.parametrize(
    ("method", "forward", "backward"),
    [
        ("ring", ["send k, v"], ["send k, v", "send dk, dv"]),
        ("all_gather", ["all_gather k, v"], ["all_gather k, v", "reduce_scatter dk, dv"]),
        ("all_to_all", ["all_to_all q, k, v", "all_to_all y"], ["all_to_all y", "all_to_all q, k, v"]),
    ],
)
def test_attention_over_a_context_axis_moves_what_its_method_does(
    explain: Explain, method: str, forward: list[str], backward: list[str]
) -> None:
    overrides = ["parallel.cp=2", f"context.method={method}", "train.seq_len=1024", "model.max_seq_len=1024"]
    out = explain("llama-tiny", *overrides)
    lines = out.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("  attention "))
    shown = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines[first : first + 2]]
    moves = {cell for cells in shown for cell in cells if " " in cell and cell.split()[0] in MOVES}
    assert moves == {*forward, *backward}


def test_messages_of_a_ring_are_counted_with_their_bytes(explain: Explain) -> None:
    """Half of 8192 tokens of keys and values, of 2 KV heads a tp rank; gradients are sums in float32."""
    overrides = ["parallel.tp=4", "parallel.cp=2", "train.micro_batch_size=1", "train.seq_len=8192"]
    out = explain("llama3-8b", *overrides)
    assert "send k, v" in out
    assert "all_gather k, v" not in out
    rank = json.loads(explain("llama3-8b", *overrides, "--json"))["modes"][0]["ranks"][0]
    core = next(op for op in rank["block"] if op["name"] == "layers.0.attention")
    messages = [step for step in (*core["forward"], *core["backward"]) if step["step"] == "messages"]
    block = 4096 * 2 * 2 * 128
    width = {"bfloat16": 2, "float32": 4}[messages[2]["dtype"]]
    assert [(each["tensor"], each["sent"], each["received"], each["sent_bytes"]) for each in messages] == [
        ("k, v", [2 * block], [2 * block], 2 * block),
        ("k, v", [2 * block], [2 * block], 2 * block),
        ("dk, dv", [width * block], [width * block], width * block),
    ]
    step = rank["step"]["collectives"]
    assert step["messages"] == 3 * 32
    assert "reduce_scatter" in step["counts"]
    assert "96 send" in out


def test_what_is_shared_out_and_what_that_moves_is_said_by_axis(explain: Explain) -> None:
    out = explain("llama-tiny", "parallel.dp_shard=4", "parallel.dp_replicate=2", "--tp", "2")
    assert "shared out over dp_shard: between steps a rank keeps 1/4" in out
    assert "moves over dp_shard: 5 all_gather, 3 reduce_scatter, " in out
    staged = explain("llama-tiny", "parallel.dp_shard=2", "parallel.pp=2", "train.gradient_accumulation=4")
    assert "its stages are gathered once a step, and whole until that is done" in staged
    assert "moves over dp_shard: 2 all_gather, 2 reduce_scatter, " in staged
    assert "moves over dp_replicate: 3 all_reduce, " in out
    assert "shared out" not in explain("llama-tiny", "--tp", "2")
