"""`kvtransfer config check` and `convert` on the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from test_cli import exit_code

from kvtransfer.config import Config, resolve
from kvtransfer.config_pages import pages_of, record_bytes
from kvtransfer.config_tiers import DiskOptions, HostOptions, RedisOptions
from kvtransfer.kernels.errors import ConfigError
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.tiers.host import HostTier

ROOT = Path(__file__).resolve().parent.parent
MODEL = ["--layers", "32", "--kv-heads", "8", "--head-dim", "128", "--dtype", "bf16"]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVTRANSFER_CONFIG", "KVTRANSFER_DEADLINE_S"):
        monkeypatch.delenv(name, raising=False)


def lines(out: str) -> dict[str, list[str]]:
    """The words of each line by its first."""
    return {words[0]: words[1:] for line in out.splitlines() if (words := line.split())}


def test_check_tells_where_each_value_is_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text(
        "host_cache_gb: 16\ndeadline_s: 3\ntiers: {redis: {url: 'redis://me:hidden@h'}}\nnamespace: {salt: s4lt}"
    )
    monkeypatch.setenv("KVTRANSFER_DEADLINE_S", "4")
    assert exit_code("config", "check", str(file)) == 0
    captured = capsys.readouterr()
    rows = lines(captured.out)
    assert rows["tiers.host.cache_gb"] == ["16.0", str(file)]
    assert rows["deadline_s"] == ["4.0", "KVTRANSFER_DEADLINE_S"]
    assert rows["prefetch.stop"] == ["timeout", "default"]
    assert rows["tiers.redis.url"] == ["redis://me:***@h", str(file)]
    assert captured.err == f"warning: KVTRANSFER_DEADLINE_S: 4.0 is taken, not 3.0 of {file}: deadline_s\n"
    assert "hidden" not in captured.out and "s4lt" not in captured.out
    assert "for the pages of each tier give --layers" in captured.out


def test_check_derives_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kv.toml").write_text("host_cache_gb = 16\ndisk_cache_gb = 100\ndisk_cache_dir = '/a'")
    assert exit_code("config", "check", str(tmp_path / "kv.toml"), *MODEL, "--page-size", "32", "--tp", "2") == 0
    out = capsys.readouterr().out
    spec = KVSpec.attention(32, 32, 4, 128, 2)
    pages = (16 << 30) // record_bytes(spec)
    assert "one page of 32 tokens: 2,097,152 bytes, 2,101,248 in a tier" in out
    rows = lines(out)
    assert rows["host"][:4] == [f"{pages:,}", "pages", f"{pages * 32:,}", "tokens"]
    assert rows["disk"][:2] == [f"{(50 << 30) // record_bytes(spec):,}", "pages"]


def test_check_without_a_file_reads_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVTRANSFER_DEADLINE_S", "4")
    assert exit_code("config", "check") == 0
    assert lines(capsys.readouterr().out)["deadline_s"] == ["4.0", "KVTRANSFER_DEADLINE_S"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--layers", "0"], "--layers: expected at least 1, got 0"),
        (["--layers", "2"], "--dtype: expected one of bfloat16"),
        (["--layers", "2", "--dtype", "int3"], "--dtype: expected one of bfloat16"),
        (["--layers", "2", "--dtype", "bf16"], "--kv-heads and --head-dim: expected both, or --latent-dim"),
        (["--kv-heads", "2", "--dtype", "bf16"], "--layers: expected the number of layers"),
        ([*MODEL, "--latent-dim", "8"], "--latent-dim: expected it alone"),
        ([*MODEL, "--tp", "3"], "--tp: expected a divisor or a multiple of 8 heads, got 3"),
        ([*MODEL, "--page-size", "999999"], "tiers.host: expected room for at least one page of"),
    ],
)  # fmt: skip
def test_bad_input_to_check(options: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kv.yaml").write_text("host_cache_gb: 1")
    assert exit_code("config", "check", str(tmp_path / "kv.yaml"), *options) == 2
    captured = capsys.readouterr()
    assert says in captured.err and captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "tp", "says"),
    [
        ("share_across_tp: 6\ntiers: {redis: {url: 'redis://h'}}", 4, "tiers.redis: share_across_tp: layer 0, 'k': "),
        ("tiers: {redis: {url: 'redis://h', share_across_tp: 2}}", 4, "take share_across_tp=4 or a multiple of it"),
        ("tiers: {redis: {url: 'redis://h', share_across_tp: 8}}", 4, None),
        ("share_across_tp: 3\ntiers: {memory: {cache_gb: 1}}", 4, None),  # of one process: not cut
    ],
)
def test_check_says_whether_head_groups_fit(
    text: str, tp: int, says: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kv.yaml").write_text(f"{text}\n")
    options = [*MODEL, "--tp", str(tp)]
    assert exit_code("config", "check", str(tmp_path / "kv.yaml"), *options) == (0 if says is None else 2)
    told = capsys.readouterr().err
    assert told == "" if says is None else says in told


def test_check_warns_of_a_salt_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kv.yaml").write_text(f"namespace: {{salt_file: {tmp_path}/salt}}")
    assert exit_code("config", "check", str(tmp_path / "kv.yaml")) == 0
    assert "warning: namespace.salt_file: expected a readable file" in capsys.readouterr().err
    (tmp_path / "salt").write_text("s4lt")
    assert exit_code("config", "check", str(tmp_path / "kv.yaml")) == 0
    captured = capsys.readouterr()
    assert captured.err == "" and "s4lt" not in captured.out


def test_a_wrong_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kv.yaml").write_text("hostcache_gb: 1")
    assert exit_code("config", "check", str(tmp_path / "kv.yaml")) == 2
    assert "did you mean 'host_cache_gb'?" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--latent-dim", "576"], ["--kv-heads", "2", "--head-dim", "64", "--tp", "8"]])
def test_other_geometries(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kv.yaml").write_text("host_cache_gb: 1\nkv_dtype: float8_e4m3")
    assert exit_code("config", "check", str(tmp_path / "kv.yaml"), "--layers", "3", *options) == 0
    size = 576 * 16 * 3 if options[0] == "--latent-dim" else 64 * 2 * 16 * 3
    assert f"one page of 16 tokens: {size:,} bytes" in capsys.readouterr().out


def test_check_is_quick_about_it(tmp_path: Path) -> None:
    """Without a geometry torch is not loaded."""
    (tmp_path / "kv.yaml").write_text("host_cache_gb: 1")
    code = (
        "import sys; from kvtransfer import cli\n"
        f"try: cli.main(['config', 'check', {str(tmp_path / 'kv.yaml')!r}])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_convert_prints_our_file_and_what_became_of_each_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "flexkv.yml").write_text("cpu_cache_gb: 32\nindex_accel: 1\nenable_gds: 1")
    assert exit_code("config", "convert", str(tmp_path / "flexkv.yml"), "--ranks", "4") == 1
    captured = capsys.readouterr()
    (tmp_path / "ours.yaml").write_text(captured.out)
    assert resolve(tmp_path / "ours.yaml", environment={}).config == Config(tiers={"host": HostOptions(cache_gb=8)})
    assert captured.out.startswith("# refused: enable_gds: 1: ")
    said = captured.err.splitlines()
    assert said[0].startswith("mapped      cpu_cache_gb: tiers.host.cache_gb (32 for 4 rank(s)")
    assert said[1] == "not needed  index_accel: there is one index"
    assert said[2].startswith("refused     enable_gds: the disk tier goes through host memory")


def test_convert_writes_a_new_file_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "flexkv.json").write_text('{"cpu_cache_gb": 32}')
    command = ["config", "convert", str(tmp_path / "flexkv.json"), "--output", str(tmp_path / "ours.yaml")]
    assert exit_code(*command) == 0
    assert not capsys.readouterr().out
    assert resolve(tmp_path / "ours.yaml", environment={}).config.host.cache_gb == 32
    assert exit_code(*command) == 2
    assert "--output" in capsys.readouterr().err


def test_pages_are_those_that_the_tier_makes() -> None:
    for layers, page_size, head_dim in ((1, 1, 8), (3, 7, 24), (2, 16, 128), (5, 600, 40)):
        spec = KVSpec.attention(layers, page_size, 2, head_dim, 2)
        for gb in (0.001, 0.0123):
            options = HostOptions(cache_gb=gb, pin=False)
            (planned,) = pages_of(Config(tiers={"host": options}), spec)
            with HostTier(spec, **options.settings()) as host:
                assert host.num_slots == planned.pages


def test_pages_of_every_way_to_give_a_size() -> None:
    spec = KVSpec.attention(2, 16, 2, 64, 2)  # 16 KiB, and a trailer of 4
    per_page = 20480
    redis = RedisOptions(url="r")
    disk = DiskOptions(cache_gb=1, paths=("/a",))

    def pages(host: HostOptions, **more: int) -> list[int | None]:
        config = Config(tiers={"host": host, "redis": redis, "disk": disk}, instances=2)
        return [tier.pages for tier in pages_of(config, spec, ranks=4, **more)]

    shared = (1 << 30) // 8 // per_page
    assert pages(HostOptions()) == [None, None, shared]
    assert pages(HostOptions(pages=5)) == [5, None, shared]
    assert pages(HostOptions(ratio=2)) == [None, None, shared]
    assert pages(HostOptions(ratio=2), device_pages=100) == [2 * 100 * 16384 // per_page, None, shared]
    with pytest.raises(ConfigError, match=r"tiers.host: expected room for at least one page of 20,480 bytes"):
        pages(HostOptions(cache_gb=1e-6))
    with pytest.raises(ConfigError, match="ranks: expected at least 1"):
        pages_of(Config(), spec, ranks=0)
