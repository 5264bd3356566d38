"""A fetch: which shards, what is checked against published lists, what a run after another one finds in the folder."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from reclaim.cli import app as cli
from reclaim.data.errors import ConfigError, TraceError
from reclaim.data.fetch.job import GIVE_UP_AFTER, FetchConfig, FetchReport, first_missing, parse_shards
from reclaim.data.fetch.ledger import LEDGER, Ledger
from reclaim.data.fetch.locations import TRACES
from tests.data.fetch.mirror import BODY, PATIENCE_S, SHARD, Fault, Mirror, files_in, run, shards, wait_until


@pytest.mark.parametrize(
    ("text", "shards"),
    [("0", (0,)), ("0-3", (0, 1, 2, 3)), ("0-3,7", (0, 1, 2, 3, 7)), ("7, 1 - 2,2", (1, 2, 7)), ("00", (0,))],
)
def test_shards_are_numbers_and_ranges(text: str, shards: tuple[int, ...]) -> None:
    assert parse_shards(text) == shards


@pytest.mark.parametrize("text", ["", ",", "3-1", "-1", "1-", "a", "1;2", "1-2-3", "0-99999999999", "1.5"])
def test_shards_that_are_neither_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"expected numbers and ranges below 1,000,000, such as 0-3,7"):
        parse_shards(text)


@settings(deadline=None)
@given(st.integers(0, 5_000))
def test_the_number_of_shards_is_found_in_few_requests(n: int) -> None:
    asked: list[int] = []
    assert first_missing(lambda shard: asked.append(shard) or shard < n) == n  # type: ignore[func-returns-value]  # on purpose
    assert len(asked) <= 2 + 2 * n.bit_length()


def test_a_server_that_says_that_every_shard_is_there_is_not_asked_for_ever() -> None:
    with pytest.raises(TraceError, match=r"says that shard .* of a table exists, too; check --base-url"):
        first_missing(lambda _: True)


def test_without_shards_all_are_fetched_and_their_number_is_requested_once(tmp_path: Path, mirror: Mirror) -> None:
    mirror.files = shards(11) | shards(1, "machine_events")
    tables = ("instance_usage", "machine_events")
    assert len(run(mirror, tmp_path / "o", tables=tables, shards=None).fetched) == 12
    assert files_in(tmp_path / "o") == mirror.files
    mirror.asked.clear()
    report = run(mirror, tmp_path / "o", tables=tables, shards=None)
    assert (report.fetched, len(report.files), mirror.asked) == ((), 12, [])


def test_of_several_tables_a_shorter_one_yields_the_shards_it_has(tmp_path: Path, mirror: Mirror) -> None:
    mirror.files = shards(5) | shards(2, "machine_events")
    tables = ("instance_usage", "machine_events")
    names = run(mirror, tmp_path / "o", tables=tables, shards="1-3").files
    assert [n[:-8] for n in names] == [
        "instance_usage-000000000001", "instance_usage-000000000002", "instance_usage-000000000003",
        "machine_events-000000000001",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"no shard 5 \(instance_usage has 5, machine_events has 2, counted from 0\)"):
        run(mirror, tmp_path / "o", tables=tables, shards="3-5")


def test_an_unpublished_shard_is_named_with_the_options_to_check(tmp_path: Path, mirror: Mirror) -> None:
    mirror.files = shards(2)
    with pytest.raises(
        TraceError, match=r"1 of 2 files not fetched: http.*000007.json.gz: no such object .HTTP 404.*--shards"
    ):
        run(mirror, tmp_path / "o", shards="1,7")
    assert list(files_in(tmp_path / "o")) == ["instance_usage-000000000001.json.gz"]
    assert len(mirror.gets("instance_usage-000000000007.json.gz")) == 1  # it will not come by asking again
    with pytest.raises(TraceError, match=r"machine_events-000000000000.json.gz: no such object; check --base-url"):
        run(mirror, tmp_path / "o", tables=("machine_events",), shards=None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trace": "google-v9"}, "trace must be one of google-v3, google-v2.1, alibaba-2017, got 'google-v9'"),
        ({"cell": "i"}, "--cell must be one of a, b, c, d, e, f, g, h, got 'i'"),
        ({"trace": "google-v2.1", "tables": ()}, "google-v2.1 has no cells; leave out --cell a"),
        ({"tables": ("usage", "jobs")}, "google-v3: no table jobs, usage; it has collection_events, instance_events"),
        ({"trace": "alibaba-2017", "cell": None, "tables": ()}, "no public address; .* survey: .* --base-url URL"),
        ({"base_url": "http://example.org/x"}, "expected an https:// URL"),
        ({"base_url": "ftp://127.0.0.1/x"}, "expected an https:// URL"),
        ({"base_url": "traces"}, "expected an https:// URL"),
        ({"base_url": "https://"}, "expected an https:// URL"),
        ({"base_url": "http://[::1"}, "not a URL"),
        ({"parallel": 0}, "parallel must be between 1 and 64, got 0"),
        ({"shards": "x"}, "--shards 'x'"),
    ],
)
def test_a_mistake_in_the_options_is_named_before_any_request(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FetchConfig(**({"trace": "google-v3", "cell": "a"} | changes))


def test_published_addresses_are_https_and_name_every_object() -> None:
    assert FetchConfig("google-v3", cell="b").url == "https://storage.googleapis.com/clusterdata_2019_b"
    assert TRACES["google-v3"].objects["machine_events"].format(shard=3, shards=None) == (
        "machine_events-000000000003.json.gz"
    )
    old = TRACES["google-v2.1"]
    assert FetchConfig("google-v2.1").url == "https://storage.googleapis.com/clusterdata-2011-2"
    assert old.objects["task_usage"].format(shard=7, shards=old.shards["task_usage"]) == (
        "task_usage/part-00007-of-00500.csv.gz"
    )
    for host in ("http://localhost:1/x", "http://[::1]:1", "http://127.0.0.2", "https://example.org/x"):
        assert FetchConfig("alibaba-2017", base_url=host + "/").url == host


V2_NAMES = ("task_usage/part-00000-of-00500.csv.gz", "task_usage/part-00001-of-00500.csv.gz")


def v2(mirror: Mirror, out: Path) -> FetchReport:
    return run(mirror, out, trace="google-v2.1", cell=None, tables=("task_usage",), shards="0-1")


def publish_v2(mirror: Mirror, **sums: str) -> None:
    mirror.files |= {name: name.encode() * 50 for name in V2_NAMES} | {"schema.csv": b"file pattern,field number\n"}
    lines = {name: hashlib.sha256(mirror.files[name]).hexdigest() for name in V2_NAMES} | sums
    mirror.files["SHA256SUM"] = "".join(f"{digest} *{name}\n" for name, digest in lines.items()).encode()
    mirror.md5 = False


def test_each_file_of_the_2011_trace_is_checked_against_the_published_list(tmp_path: Path, mirror: Mirror) -> None:
    publish_v2(mirror)
    mirror.faults[V2_NAMES[1]] = [Fault(wrong_bytes=True)]
    report = v2(mirror, tmp_path / "o")
    assert files_in(tmp_path / "o") == mirror.files
    assert mirror.asked[0][1] == "SHA256SUM"
    assert mirror.gets(V2_NAMES[1]) == ["", ""]
    assert report.files == ("schema.csv", *V2_NAMES)
    assert report.unchecked == ("schema.csv",)  # the list made above leaves it out
    mirror.asked.clear()
    assert v2(mirror, tmp_path / "o").fetched == ()
    assert mirror.asked == []


def test_a_file_that_is_not_the_published_one_is_refused(tmp_path: Path, mirror: Mirror) -> None:
    publish_v2(mirror, **{V2_NAMES[0]: "0" * 64})
    with pytest.raises(TraceError, match=rf"1 of 3 files not fetched: .*{V2_NAMES[0]}: wrong sha256: expected 0{{64}}"):
        v2(mirror, tmp_path / "o")
    assert V2_NAMES[0] not in files_in(tmp_path / "o")


def test_a_malformed_list_of_checksums_is_refused(tmp_path: Path, mirror: Mirror) -> None:
    mirror.files["SHA256SUM"] = b"<html>Sign in</html>\n"
    with pytest.raises(TraceError, match="SHA256SUM line 1: not a line of a sha256sum list"):
        v2(mirror, tmp_path / "o")


def test_a_table_of_known_size_has_no_shard_beyond_it(tmp_path: Path, mirror: Mirror) -> None:
    publish_v2(mirror)
    with pytest.raises(ConfigError, match=r"no shard 500 \(task_usage has 500, counted from 0\)"):
        run(mirror, tmp_path / "o", trace="google-v2.1", cell=None, tables=("task_usage",), shards="0,500")


def test_a_file_copied_by_hand_is_kept_if_its_checksum_is_the_published_one(tmp_path: Path, mirror: Mirror) -> None:
    publish_v2(mirror)
    for name, content in ((V2_NAMES[0], mirror.files[V2_NAMES[0]]), (V2_NAMES[1], b"something else")):
        (tmp_path / "o" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "o" / name).write_bytes(content)
    assert v2(mirror, tmp_path / "o").fetched == ("schema.csv", V2_NAMES[1])
    assert files_in(tmp_path / "o") == mirror.files


def test_the_alibaba_trace_comes_from_the_address_given(tmp_path: Path, mirror: Mirror) -> None:
    mirror.files = {f"{table}.csv": table.encode() for table in TRACES["alibaba-2017"].objects}
    run(mirror, tmp_path / "o", trace="alibaba-2017", cell=None, tables=(), shards=None)
    assert files_in(tmp_path / "o") == mirror.files


def test_an_unchanged_file_is_not_read_again(tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror.files[SHARD] = BODY
    run(mirror, tmp_path / "o")
    monkeypatch.setattr("reclaim.data.fetch.download.file_sha256", _interrupt)
    assert run(mirror, tmp_path / "o").fetched == ()


def test_verified_files_are_not_requested_again_and_changed_ones_are(tmp_path: Path, mirror: Mirror) -> None:
    mirror.files |= shards(3)
    run(mirror, tmp_path / "o", shards="0-2")
    mirror.asked.clear()
    names = sorted(mirror.files)
    os.utime(tmp_path / "o" / names[0])  # touched, and still the same bytes
    (tmp_path / "o" / names[1]).write_bytes(bytes(len(mirror.files[names[1]])))  # as long, of other bytes
    (tmp_path / "o" / names[2]).unlink()
    assert run(mirror, tmp_path / "o", shards="0-2").fetched == tuple(names[1:])
    assert files_in(tmp_path / "o") == mirror.files
    assert sorted(name for _, name, _ in mirror.asked) == names[1:]


def test_one_failure_lets_the_others_finish_and_all_failures_are_named(tmp_path: Path, mirror: Mirror) -> None:
    mirror.files |= shards(8)
    bad = sorted(mirror.files)[1:3]
    mirror.always |= {bad[0]: Fault(status=410), bad[1]: Fault(wrong_bytes=True)}
    with pytest.raises(TraceError, match=rf"2 of 8 files.*{bad[0]}: HTTP 410.*{bad[1]}: wrong md5.*what came is kept"):
        run(mirror, tmp_path / "o", shards="0-7", parallel=2)
    assert sorted(files_in(tmp_path / "o")) == sorted(set(mirror.files) - set(bad))
    mirror.always.clear()
    assert run(mirror, tmp_path / "o", shards="0-7").fetched == tuple(bad)


def test_when_everything_fails_the_rest_is_not_tried(tmp_path: Path, mirror: Mirror) -> None:
    with pytest.raises(TraceError, match=f"{GIVE_UP_AFTER} of 200 files not fetched; gave up after {GIVE_UP_AFTER}: "):
        run(mirror, tmp_path / "o", shards="0-199", parallel=1)
    assert len(mirror.asked) < 50


def test_several_files_are_on_their_way_at_once(tmp_path: Path, mirror: Mirror) -> None:
    mirror.files |= shards(8)
    mirror.before_answer = threading.Barrier(4, timeout=PATIENCE_S).wait  # no answer before four have asked
    run(mirror, tmp_path / "o", shards="0-7", parallel=4)
    assert files_in(tmp_path / "o") == mirror.files


def test_a_folder_of_another_cell_is_refused(tmp_path: Path, mirror: Mirror) -> None:
    mirror.files[SHARD] = BODY
    run(mirror, tmp_path / "o")
    with pytest.raises(ConfigError, match="o: holds google-v3 cell a; choose another folder"):
        run(mirror, tmp_path / "o", cell="b")
    with pytest.raises(ConfigError, match="o: holds google-v3 cell a; choose another folder"):
        v2(mirror, tmp_path / "o")


def test_a_folder_locked_by_another_fetch_is_refused(tmp_path: Path, mirror: Mirror) -> None:
    with Ledger(tmp_path / "o"), pytest.raises(ConfigError, match="another fetch is writing into it"):
        run(mirror, tmp_path / "o")
    assert mirror.asked == []


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path: Path, mirror: Mirror) -> None:
    (tmp_path / "o").write_text("")
    for out in (tmp_path / "o", tmp_path / "o" / "below"):
        with pytest.raises(ConfigError, match="is not a folder; choose another"):
            run(mirror, out)


def test_the_fact_of_a_truncated_ledger_line_is_determined_again(tmp_path: Path, mirror: Mirror) -> None:
    mirror.files |= shards(2)
    run(mirror, tmp_path / "o", shards="0-1", parallel=1)
    ledger = tmp_path / "o" / LEDGER
    ledger.write_bytes(ledger.read_bytes()[:-20])
    assert run(mirror, tmp_path / "o", shards="0-1").fetched == ("instance_usage-000000000001.json.gz",)
    assert files_in(tmp_path / "o") == mirror.files


def test_a_ledger_line_after_a_truncated_one_is_kept(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        ledger.put("done", "a", bytes=1)
        ledger.put("done", "b", bytes=2)
    (tmp_path / LEDGER).write_bytes((tmp_path / LEDGER).read_bytes()[:-3])
    with Ledger(tmp_path) as ledger:
        ledger.put("done", "c", bytes=3)
    with Ledger(tmp_path) as ledger:
        assert [ledger.get("done", name).get("bytes") for name in "abc"] == [1, None, 3]


def test_a_full_disk_ends_the_run_at_once_and_received_bytes_are_kept(
    tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror.files |= shards(100)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            run(mirror, tmp_path / "o", shards="0-99", parallel=1)
    assert len(mirror.asked) < 50
    assert all(name.endswith(".partial") for name in files_in(tmp_path / "o"))
    run(mirror, tmp_path / "o", shards="0-99")
    assert files_in(tmp_path / "o") == mirror.files


def test_no_file_has_its_name_before_its_check(tmp_path: Path, mirror: Mirror) -> None:
    seen: list[list[str]] = []
    mirror.files[SHARD] = BODY
    mirror.faults[SHARD] = [
        Fault(hold=lambda: seen.append(list(files_in(tmp_path / "o"))), wrong_bytes=wrong) for wrong in (True, False)
    ]
    run(mirror, tmp_path / "o")
    assert all(SHARD not in names for names in seen)
    assert len(seen) == 2


def test_a_run_after_a_kill_requests_only_the_rest(tmp_path: Path, mirror: Mirror) -> None:
    killed = threading.Event()
    mirror.files[SHARD], mirror.faults[SHARD] = BODY, [Fault(hold=lambda: killed.wait(PATIENCE_S))]
    words = ["fetch", "google-v3", "o", "--cell", "a", "--table", "instance_usage", "--shards", "0"]
    code = "from reclaim.cli.app import main; main()"
    process = subprocess.Popen([sys.executable, "-c", code, *words, "--base-url", mirror.url], cwd=tmp_path)
    partial = tmp_path / "o" / (SHARD + ".partial")
    wait_until(lambda: partial.exists() and partial.stat().st_size > 100_000)
    process.kill()
    process.wait()
    killed.set()
    have = partial.stat().st_size
    assert 100_000 < have <= len(BODY) // 2
    assert run(mirror, tmp_path / "o").n_bytes == len(BODY) - have
    assert files_in(tmp_path / "o") == {SHARD: BODY}
    assert mirror.gets() == ["", f"bytes={have}-"]


@pytest.mark.parametrize("step", ["replace", "fsync"])
def test_a_run_stopped_just_before_the_end_makes_no_second_request(
    tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    mirror.files[SHARD] = BODY
    with monkeypatch.context() as patch:
        patch.setattr(os, step, _interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(mirror, tmp_path / "o")
    assert list(files_in(tmp_path / "o")) == [SHARD + ".partial"]
    run(mirror, tmp_path / "o")
    assert files_in(tmp_path / "o") == {SHARD: BODY}
    assert len(mirror.asked) == 1


def test_the_command_prints_its_result(tmp_path: Path, mirror: Mirror) -> None:
    mirror.files |= shards(4)
    words = ["fetch", "google-v3", str(tmp_path / "o"), "--cell", "a", "--table", "instance_usage", "--shards", "0-2"]
    words += ["--base-url", mirror.url]
    result = CliRunner().invoke(cli.app, words)
    assert (result.exit_code, result.stdout) == (
        0, f"{tmp_path / 'o'}: 3 files, 3 of them new (3,003 bytes); 0 without a published checksum\n"
    )  # fmt: skip
    facts = json.loads(CliRunner().invoke(cli.app, [*words, "--json"]).stdout)
    assert facts == {
        "folder": str(tmp_path / "o"), "files": sorted(shards(3)), "fetched": [], "n_bytes": 0, "unchecked": [],
    }  # fmt: skip


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
