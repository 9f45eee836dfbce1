"""`sparkctl plan`: what it prints, its exit codes, and that nothing but headers is read."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sparse_models import make_full, make_one_of_twenty

from sparkctl.main import main
from sparkctl.plan import PREDICTED

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "laguna": make_full("laguna", folder),
        "qwen35moe": make_full("qwen35moe", folder),
        "parts": make_one_of_twenty("hybrid-parts", folder),
    }


def planned(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict]:
    code = main(["plan", *map(str, words), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_model_of_20_gib_is_planned_from_a_few_mib_of_headers(models, capsys):
    path = models["laguna"]
    assert path.stat().st_size > 20e9 and path.stat().st_blocks * 512 < 16 << 20
    code, told = planned(capsys, path, "--host", 32, "--gpu", "rtx-3090", "--vram", 14.6, "--sequences", 1)
    assert code == 0 and told["fits"]
    card = told["device"]
    tiers = ("context", "core", "hot", "ring", "reserve", "kv", "state", "workspace")
    assert sum(card[tier] for tier in tiers) == card["used_bytes"]
    assert card["used_bytes"] + card["slack"] == card["limit_bytes"] == int(14.6 * (1 << 30))
    assert 0.5 < card["residency"] < 0.65 and card["ring_slots"] == 32 and len(card["hot_slots"]) == 39
    assert card["note"] == PREDICTED
    host = told["host"]
    assert host["core"] + host["hot"] + host["kv"] + host["state"] < host["need_total_bytes"]
    assert told["hits"]["hot"] < told["hits"]["ring"] < 1
    for speed in (told["decode"], told["decode_without_ring"], told["prefill"]):
        longest = max((term["seconds"] for term in speed["overlapping"]), default=0)
        assert speed["seconds"] == pytest.approx(sum(term["seconds"] for term in speed["serial"]) + longest)
        assert speed["tokens_s"] == pytest.approx(speed["tokens"] / speed["seconds"])
        for term in speed["serial"] + speed["overlapping"]:
            assert term["source"] and term["seconds"] == pytest.approx(term["idle"] + term["amount"] / term["rate"])


def test_people_see_every_tier_every_term_and_that_a_card_is_a_prediction(models, capsys):
    assert main(["plan", str(models["qwen35moe"]), "--host", "32", "--gpu", "4080", "--context", "32768"]) == 0
    said = capsys.readouterr().out
    for tier in ("core", "experts, hot", "experts, ring", "reserve", "keys and values", "recurrent state", "workspace"):
        assert re.search(rf"^ {tier}.* [\d.]+ [KMG]iB", said, re.MULTILINE), tier
    for term in ("core from VRAM", "experts from VRAM", "experts over the link", "launches", "products"):
        assert re.search(rf"{term} .* [\d.]+ .*\d\.\d\d ", said), term
    assert f"note: {PREDICTED}" in said
    assert "of all experts hot on the card, a ring of 32 slots in each layer" in said
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", said)


def test_without_a_card_nothing_is_said_of_one(models, capsys):
    code, told = planned(capsys, models["parts"], "--host", 1)
    assert code == 0 and told["device"] is None
    assert {term["name"] for term in told["decode"]["serial"]} >= {"core from host memory", "experts from host memory"}
    assert main(["plan", str(models["parts"]), "--host", "1"]) == 0
    assert "prediction" not in capsys.readouterr().out


def test_any_part_of_a_set_and_its_folder_give_the_same_plan(models, capsys):
    path = models["parts"]
    plans = [planned(capsys, part, "--host", 1)[1] for part in sorted(path.parent.glob("hybrid-parts-*.gguf"))]
    assert len(plans) == 3 and plans[0] == plans[1] == plans[2]


def test_what_does_not_fit_ends_with_status_1_and_tells_what_would(models, capsys):
    code, told = planned(capsys, models["laguna"], "--host", 1)
    assert code == 1 and not told["fits"] and told["decode"] is None
    missing = told["host"]["need_bytes"] - (1 << 30)
    assert told["host"]["missing_bytes"] == missing > 0
    assert f"GiB of weights at least, --host allows 1.00 GiB: {missing / (1 << 30):.2f} GiB are" in told["advice"][0]
    assert main(["plan", str(models["laguna"]), "--host", "10", "--gpu", "h200"]) == 1
    out, err = capsys.readouterr()
    assert "needs 18.90 GiB of weights with all experts, --host allows 10.00 GiB: 8.90 GiB are missing" in out
    assert err == ""


def test_a_model_larger_than_host_memory_fits_in_part_and_says_what_all_of_it_would_take(models, capsys):
    code, told = planned(capsys, models["laguna"], "--host", 10)
    host = told["host"]
    assert code == 0 and host["partial"] and 0.4 < host["residency"] < 0.5
    slots = sum(host[kind] for kind in ("hot", "ring", "spare", "reserve"))
    assert host["core"] + slots + host["directory"] == host["need_bytes"] <= 10 * (1 << 30)
    assert "experts from disk" in {term["name"] for term in told["decode"]["serial"]}
    assert "needs 18.90 GiB of weights with all experts, --host allows 10.00 GiB" in told["advice"][0]


def test_a_card_with_too_little_memory_tells_the_largest_context_that_fits(models, capsys):
    words = ("--host", 32, "--gpu", "rtx-2060", "--sequences", 4)
    code, told = planned(capsys, models["laguna"], *words, "--context", 32768)
    largest = told["context"]["largest"]
    assert code == 1 and 64 <= largest < 32768
    assert planned(capsys, models["laguna"], *words, "--context", largest)[0] == 0
    assert planned(capsys, models["laguna"], *words, "--context", largest + 64)[0] == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--context", "3"], "flag --context: limits.context = 3 is refused: it is a whole number from 64 to 4194304"),
        (["--sequences", "0"], "flag --sequences: limits.sequences = 0 is refused: it is a whole number from 1 to 64"),
        (["--gpu", "voodoo"], "no figures for a card 'voodoo'; known ones: rtx-2060, "),
        (["--gpu", "h200", "--link", "rope"], "'rope' is neither the name of a link nor its speed in GB/s"),
        (["--link", "25"], "a link and a ring belong to a card; name it with --gpu, or its memory with --vram"),
        (["--config", "/nowhere/c.toml"], "/nowhere/c.toml: cannot be read: No such file or directory"),
    ],
)
def test_what_cannot_be_planned_is_said_in_one_line(models, capsys, words, said):
    assert main(["plan", str(models["parts"]), *words]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"sparkctl: {said}") and err.count("\n") == 1


@pytest.mark.parametrize("words", [["--host", "nan"], ["--vram", "-1"], ["--ring", "x"], ["--disk-bandwidth", "0"]])
def test_numbers_that_cannot_be_are_wrong_usage(models, capsys, words):
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(models["parts"]), *words])
    assert ended.value.code == 2 and "is not a number of " in capsys.readouterr().err


def test_a_file_that_is_no_model_is_refused_in_one_line(tmp_path, capsys):
    for content in (b"", b"GGUF", b"GGUF\x03\0\0\0" + b"\xff" * 16, b"x" * 100):
        path = tmp_path / "m.gguf"
        path.write_bytes(content)
        assert main(["plan", str(path)]) == 1
        assert capsys.readouterr().err.count("\n") == 1
    assert main(["plan", str(tmp_path / "missing.gguf")]) == 1
    assert "no such file or folder" in capsys.readouterr().err


numbers = st.one_of(st.sampled_from(["0", "0.001", "1", "6", "24", "65536"]), st.floats(0, 65536).map(repr))


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "--host": numbers,
            "--vram": numbers,
            "--gpu": st.sampled_from(["rtx-2060", "h200", "l4"]),
            "--context": st.integers(64, 1 << 22).map(str),
            "--sequences": st.integers(1, 64).map(str),
            "--ring": st.integers(0, 1 << 16).map(str),
        },
    )
)
def test_whatever_is_asked_there_is_a_plan_or_one_line(models, capsys, given):
    words = [word for pair in given.items() for word in pair]
    for form in ([], ["--json"]):
        code = main(["plan", str(models["parts"]), *words, *form])
        out, err = capsys.readouterr()
        assert (code in (0, 1) and out and not err) or (code == 1 and not out and err.count("\n") == 1)


def test_the_help_has_an_example_that_works(models, capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    examples = re.findall(r"^  sparkctl (plan model\.gguf.*)$", capsys.readouterr().out, re.MULTILINE)
    assert len(examples) == 3
    for example in examples:
        words = example.replace("model.gguf", str(models["parts"])).split()
        assert main(words) == 0
        assert capsys.readouterr().out


def test_a_plan_computes_nothing_and_draws_no_table_for_programs(models):
    script = (
        "import sys\nfrom sparkctl.main import main\n"
        f"code = main(['plan', {str(models['parts'])!r}, '--host', '1', '--json'])\n"
        "heavy = {'rich', 'tokenizers', 'torch', 'jinja2', 'sparkd.executors.native', 'psutil'} & set(sys.modules)\n"
        "sys.exit(f'{code} {heavy}' if code or heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
