"""Places in an object store: names, missing libraries, and errors that say what to do."""

from __future__ import annotations

import errno
import os
import re
import sys
from pathlib import Path

import pytest
from fsspec.registry import _registry

import reclaim
from reclaim.cli.app import main
from reclaim.data.core.stores.places import check_folder, home_of, in_store, location, reached
from reclaim.data.errors import ConfigError, DataError
from tests.object_store import Bucket


def test_a_name_without_a_scheme_is_a_path_and_one_with_a_scheme_keeps_it(bucket: Bucket) -> None:
    assert location("cell/a") == Path("cell/a")
    assert location(Path("cell")) == Path("cell")
    place = location(f"{bucket.url}/cell/a")
    assert (str(place), place.name, in_store(place)) == (f"{bucket.url}/cell/a", "a", True)
    assert location(place) is place


def test_a_scheme_in_capitals_is_that_store_and_no_folder_of_this_machine(bucket: Bucket) -> None:
    name = bucket.url.removeprefix("s3://")
    assert str(location(f"S3://{name}/Cell/A/")) == f"s3://{name}/Cell/A"
    with pytest.raises(ConfigError, match=r"^S3:///cell: names no bucket; expected s3://bucket/folder"):
        location("S3:///cell")


def test_what_is_computed_from_a_store_has_a_folder_of_its_own_in_the_cache(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert home_of(tmp_path / "cell") == tmp_path / "cell"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    homes = [home_of(location(f"{bucket.url}/{name}")) for name in ("a b/cell", "a_b/cell", "a b/cell/")]
    assert homes[0] == homes[2] != homes[1]  # their plain names are one
    assert {home.parent.parent for home in homes} == {tmp_path / "cache" / "reclaim"}
    assert len({home.parent.name for home in homes}) == 1
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert home_of(location(f"{bucket.url}/cell")).is_relative_to(tmp_path / ".cache" / "reclaim")


def test_a_folder_that_is_a_file_or_missing_is_named(bucket: Bucket, tmp_path: Path) -> None:
    check_folder(tmp_path)
    (tmp_path / "shard").touch()
    with pytest.raises(ConfigError, match=r"shard: a file; name the folder that it is in$"):
        check_folder(tmp_path / "shard")
    with pytest.raises(ConfigError, match=r"nothing: no such folder; name that of a trace$"):
        check_folder(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"nothing: no such object, folder or bucket"):
        check_folder(location(f"{bucket.url}/nothing"))


@pytest.mark.parametrize(("module", "name", "library"), [
    ("upath", "s3://bucket/cell", "s3fs"), ("s3fs", "s3://bucket/cell", "s3fs"), ("gcsfs", "gs://bucket/cell", "gcsfs"),
])  # fmt: skip
def test_a_missing_library_is_named(module: str, name: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    for scheme in ("s3", "gs"):
        monkeypatch.delitem(_registry, scheme, raising=False)
    with pytest.raises(ConfigError, match=rf"^{name}: .* is not installed; pip install universal-pathlib {library} "):
        location(name)


def test_an_unknown_scheme_is_named_with_those_expected() -> None:
    with pytest.raises(ConfigError, match=r"^s4://bucket/cell: no store known by s4:// .*; expected s3:// or gs://"):
        location("s4://bucket/cell")


@pytest.mark.parametrize("name", ["run[12]", "run?", "run*"])
def test_a_name_that_libraries_of_stores_would_take_for_a_pattern_is_refused(name: str, bucket: Bucket) -> None:
    with pytest.raises(ConfigError, match=rf"^{re.escape(bucket.url)}/{re.escape(name)}: .* makes it a pattern; use"):
        location(f"{bucket.url}/{name}")
    assert location(name) == Path(name)


@pytest.mark.parametrize("name", ["s3://", "s3:///", "s3:///cell", "gs://"])
def test_a_name_without_a_bucket_is_refused_and_no_folder_of_this_machine(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}: names no bucket; expected {name[:2]}://bucket/folder"):
        location(name)


def test_without_credentials_the_error_says_so(bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    bucket.files()
    place = location(f"{bucket.url}/cell")
    with (
        pytest.raises(ConfigError, match=r"cell: no permission \(.*credentials.*\); check credentials"),
        reached(place),
    ):
        place.read_bytes()


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("AWS_ENDPOINT_URL", "localhost:9000", "Invalid endpoint: localhost:9000"),
        ("AWS_PROFILE", "nobody", "The config profile (nobody) could not be found"),
    ],
)
def test_a_wrong_setting_of_the_library_is_named_and_is_no_reason_to_run_again(
    name: str, wrong: str, message: str, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.files()
    monkeypatch.setenv(name, wrong)
    with pytest.raises(ConfigError, match=re.escape(f"library is wrong ({message}); correct AWS_ENDPOINT_URL")):
        check_folder(location(f"{bucket.url}/cell"))


def test_a_refusal_of_the_store_names_the_policy_and_any_other_error_the_next_run(bucket: Bucket) -> None:
    place = location(f"{bucket.url}/cell")
    with (
        pytest.raises(ConfigError, match=r"cell: no permission \(Access Denied\); .* the bucket's policy"),
        reached(place),
    ):
        raise PermissionError("Access Denied")
    with pytest.raises(DataError, match=r"cell: the store could not .* slow down\); run again"), reached(place):
        raise OSError(errno.EBUSY, "slow down")


def test_a_full_disk_and_an_error_of_a_local_file_are_not_the_stores(bucket: Bucket, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)), reached(location(f"{bucket.url}/cell")):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(FileNotFoundError), reached(tmp_path / "nothing"):
        (tmp_path / "nothing").read_bytes()


@pytest.mark.parametrize("missing", [False, True])
def test_on_the_command_line_a_mistake_about_a_store_is_one_line_and_exit_code_2(
    missing: bool, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if missing:
        monkeypatch.setitem(sys.modules, "upath", None)
    for words in (("ingest", f"{bucket.url}/cell", str(tmp_path / "out")), ("features", f"{bucket.url}/cell")):
        monkeypatch.setattr(sys, "argv", ["reclaim", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        told = capsys.readouterr().err
        assert len(told.splitlines()) == 1
        assert f"{bucket.url}/cell: " in told
        assert ("pip install universal-pathlib s3fs" in told) == missing


@pytest.mark.parametrize(
    "words",
    [
        ("synth", "s3://bucket/cell"),
        ("fetch", "google-v3", "s3://bucket/cell"),
        ("inspect", "dataset", "--html", "s3://bucket/page.html"),
        ("predict", "dataset", "--out", "gs://bucket/o.csv"),
        ("replay", "margins", "dataset", "--out", "s3://bucket/margins"),
        ("recommend", "dataset", "--out", "s3://bucket/recommend"),
        ("recommend", "dataset", "--out", "o", "--patches", "s3://bucket/patches"),
        ("tune", "dataset", "--out", "s3://bucket/best.toml"),
        ("peaks", "samples.parquet", "--out", "s3://bucket/peaks.parquet"),
        ("bundle", "reclaim@champion", "s3://bucket/model"),
        ("serve", "--state", "s3://bucket/state"),
        ("serve", "--record", "s3://bucket/seen"),
        ("feed", "s3://bucket/history", "--url", "http://127.0.0.1:1"),
        ("feed", "history", "--url", "http://127.0.0.1:1", "--out", "s3://bucket/o.csv"),
        ("demo", "--out", "s3://bucket/demo"),
    ],
    ids=" ".join,
)
def test_a_place_of_a_store_is_refused_for_what_is_written_on_this_machine_and_makes_no_folder_of_its_name(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["reclaim", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "expected a place on this machine, got one of a store" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_python_api_refuses_a_place_of_a_store_for_a_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="s3://bucket/cell: expected a place on this machine, got one of a store"):
        reclaim.synth("s3://bucket/cell")
    assert list(tmp_path.iterdir()) == []
