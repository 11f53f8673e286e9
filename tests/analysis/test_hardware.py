"""The datasheet table, and the measured ceilings with their cache."""

import datetime
import json
import math
import re
import time

import pytest
import torch

from minillm.analysis import HARDWARE, Hardware, ceilings, find_hardware
from minillm.errors import ConfigError, RequestError


@pytest.mark.parametrize(
    ("name", "memory", "bandwidth", "bf16"),
    [("a100-40", 40, 1.555e12, 312e12), ("A100", 80, 2.039e12, 312e12), ("h100", 80, 3.35e12, 989e12),
     ("H200", 141, 4.8e12, 989e12), ("b200", 180, 8e12, 2250e12), ("mi300x", 192, 5.3e12, 1307e12)],
)  # fmt: skip
def test_datasheet_figures(name, memory, bandwidth, bf16):
    device = find_hardware(name)
    assert (device.memory_bytes, device.bandwidth, device.peak("bf16")) == (memory * 10**9, bandwidth, bf16)
    assert device.checked


def test_figures_from_memory_say_so():
    assert [name for name, device in HARDWARE.items() if not device.checked] == ["L40S", "L4", "T4", "RTX-4090"]
    assert HARDWARE["MI300X"].unchecked == ("int8", "link")


def test_ridge_and_link():
    h100 = find_hardware("h100-sxm")
    assert h100.ridge() == pytest.approx(295, abs=0.5)
    assert h100.ridge("fp8") == pytest.approx(591, abs=0.5)
    assert h100.link_bandwidth == 450e9  # the datasheet sums both directions
    assert find_hardware("RTX 4090").link_bandwidth is None
    pair = h100.scaled(2)
    assert (pair.memory_gb, pair.bandwidth, pair.ridge()) == (160, 6.7e12, h100.ridge())


def test_unknown_devices_and_dtypes_are_refused():
    with pytest.raises(ConfigError, match=r"'h10'.*H100"):
        find_hardware("h10")
    with pytest.raises(ConfigError, match=r"abacus.*A100-40.*RTX-4090"):
        find_hardware("abacus")
    for name in (None, 5, b"H100"):
        with pytest.raises(ConfigError, match="a device's name is"):
            find_hardware(name)
    with pytest.raises(ConfigError) as caught:
        find_hardware("x" * 100_000)
    assert len(str(caught.value)) < 300
    with pytest.raises(ConfigError, match=r"T4 has no matrix rate for bfloat16.*float16"):
        find_hardware("t4").peak("bfloat16")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder of its own, and a measurement that costs nothing but counts itself."""
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    calls = []

    def counted(device):
        calls.append(device)
        told = {"date": "2025-01-01T00:00:00+00:00", "copy_bandwidth": 5e9 + len(calls)}
        record = ceilings._identity(device) | told | {"spread": 1.1, "cpu_share": 0.9}
        return Hardware("this", 16, 1e10 + len(calls), {"float32": 1e11}, measured=record)

    monkeypatch.setattr(ceilings, "measure", counted)
    return tmp_path / "cache" / f"ceilings-cpu-{torch.get_num_threads()}-threads.json", calls


def test_measured_once_and_then_read(cache):
    path, calls = cache
    first = ceilings.this_machine()
    assert ceilings.this_machine() == first
    assert first.copy_bandwidth == 5e9 + 1
    assert calls == ["cpu"]
    assert list(path.parent.iterdir()) == [path]
    assert ceilings.this_machine(refresh=True).bandwidth == 1e10 + 2
    assert ceilings.this_machine().bandwidth == 1e10 + 2


def _edit(path, change):
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_text("{"),
        lambda path: path.write_text("[]"),
        lambda path: path.write_bytes(b"\xff\xfe\x00"),
        lambda path: path.write_text(""),
        lambda path: _edit(path, lambda raw: raw["value"].pop("bandwidth")),
        lambda path: _edit(path, lambda raw: raw["value"].update(bandwidth="fast")),
        lambda path: _edit(path, lambda raw: raw["value"].update(bandwidth=-1.0)),
        lambda path: _edit(path, lambda raw: raw["value"].update(bandwidth=math.nan)),
        lambda path: _edit(path, lambda raw: raw["value"].update(peak_flops={})),
        lambda path: _edit(path, lambda raw: raw["value"]["measured"].update(date="yesterday")),
        lambda path: _edit(path, lambda raw: raw["value"].update(surprise=1)),
    ],
)
def test_a_damaged_cache_is_measured_again(cache, spoil):
    path, calls = cache
    ceilings.this_machine()
    spoil(path)
    assert ceilings.this_machine().bandwidth == 1e10 + 2
    assert ceilings.this_machine().bandwidth == 1e10 + 2
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("target", "name", "value"),
    [(torch, "get_num_threads", lambda: 77), (torch, "__version__", "0.1"), (ceilings, "cpu_name", lambda: "abacus")],
)
def test_another_processor_torch_or_thread_count_is_measured_again(cache, monkeypatch, target, name, value):
    _, calls = cache
    ceilings.this_machine()
    monkeypatch.setattr(target, name, value)
    ceilings.this_machine()
    assert len(calls) == 2


def test_an_unwritable_folder_costs_a_warning_and_no_result(cache, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="cannot be written") as caught:
        assert ceilings.this_machine().bandwidth == 1e10 + 1
    assert len(caught) == 1
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_real_measurement_is_quick_and_sane():
    start = time.perf_counter()
    machine = ceilings.measure(buffer_bytes=64 << 20)
    assert time.perf_counter() - start < 10
    assert 1e8 < machine.bandwidth < 1e13
    assert 1e8 < machine.copy_bandwidth < 1e13
    assert 1e8 < machine.peak("float32") < 1e15
    assert machine.measured["threads"] == torch.get_num_threads()
    assert machine.measured["torch"] == torch.__version__
    assert re.match(r"\d{4}-\d\d-\d\dT", machine.measured["date"])
    assert machine.memory_bytes > 1e9


def test_the_buffer_gives_way_when_memory_is_short(monkeypatch):
    monkeypatch.setattr(ceilings, "_available_bytes", lambda device: 64 << 30)
    assert ceilings._buffer_bytes("cpu") == 512 << 20
    monkeypatch.setattr(ceilings, "_available_bytes", lambda device: 1 << 30)
    assert ceilings._buffer_bytes("cpu") == 128 << 20
    monkeypatch.setattr(ceilings, "_available_bytes", lambda device: 0)
    assert ceilings._buffer_bytes("cpu") == 16 << 20


def test_the_timer_takes_the_fastest_after_a_warm_up_and_the_spread(monkeypatch):
    clock = iter([0.0, 0.3, 1.0, 1.1, 2.0, 2.2, 3.0, 3.9, 4.0, 4.2])
    monkeypatch.setattr(ceilings.time, "perf_counter", lambda: next(clock))
    calls, timer = [], ceilings._Timer("cpu")
    assert timer.fastest_seconds(lambda: calls.append(1)) == pytest.approx(0.1)
    assert len(calls) == 6
    assert timer.spread == pytest.approx(2)


@pytest.mark.parametrize(
    ("sign", "words"),
    [({"spread": 3.0}, r"busy.*3\.0 times"), ({"cpu_share": 0.5}, r"busy.*threads had 50% of their cores' time")],
)
def test_ceilings_of_a_busy_machine_hold_for_an_hour_and_say_so(cache, sign, words):
    path, calls = cache
    ceilings.this_machine()
    now = datetime.datetime.now(datetime.UTC)
    recent, old = (now - datetime.timedelta(minutes=age) for age in (5, 65))
    _edit(path, lambda raw: raw["value"]["measured"].update(sign, date=recent.isoformat()))
    with pytest.warns(UserWarning, match=words):
        ceilings.this_machine()
    assert len(calls) == 1
    _edit(path, lambda raw: raw["value"]["measured"].update(date=old.isoformat()))
    ceilings.this_machine()
    assert len(calls) == 2


def test_a_core_that_is_shared_all_along_shows_in_the_time_that_was_had():
    """Every run is then as slow as the others. Work that sleeps stands for work that waits for a core."""

    def work(seconds, busy):
        end = time.process_time() + seconds * busy
        while time.process_time() < end:
            pass
        time.sleep(seconds * (1 - busy))

    alone, shared = ceilings._Timer("cpu"), ceilings._Timer("cpu")
    for _ in range(3):
        alone.note_share(lambda: work(0.05, 1.0))
        shared.note_share(lambda: work(0.05, 0.3))
    threads = torch.get_num_threads()  # the work above has one
    assert shared.cpu_share * threads < 0.4
    assert 0 < shared.cpu_share < alone.cpu_share <= 1.01 / threads


def test_a_measurement_that_makes_no_sense_is_an_error(cache, monkeypatch):
    broken = Hardware("this", 16, 0.0, {"float32": 1e11}, measured={})
    monkeypatch.setattr(ceilings, "measure", lambda device: broken)
    with pytest.raises(RequestError, match="make no sense"):
        ceilings.this_machine()


def test_a_dtype_without_units_is_not_waited_for(monkeypatch):
    """On a CPU with no bfloat16 units a product of 2048 takes a minute: the small trial's rate is the answer."""
    asked = []

    def rate(timer, dtype, size):
        asked.append((dtype, size))
        return 2e9 if dtype == "bfloat16" else 1e11

    monkeypatch.setattr(ceilings, "_product_rate", rate)
    timer = ceilings._Timer("cpu")
    assert ceilings._matmul_rate(timer, "bfloat16") == 2e9
    assert max(size for dtype, size in asked if dtype == "bfloat16") == 256
    assert ceilings._matmul_rate(timer, "float32") == 1e11
    assert ("float32", 2048) in asked
