"""Accounting of the allocator, addresses, resizing, pinned memory."""

import gc
import itertools
import threading

import pytest
import torch


@pytest.fixture
def stats():
    """Statistics of device 0, with nothing left over from other tests."""
    torch.tpu.init()
    gc.collect()
    torch.tpu.reset_peak_memory_stats()
    torch.tpu.reset_accumulated_memory_stats()
    return lambda: torch.tpu.memory_stats(0)


def test_allocated_and_freed_bytes_are_counted(stats):
    before = torch.tpu.memory_allocated()
    x = torch.empty(1000, device="tpu")
    assert torch.tpu.memory_allocated() == before + 4000
    assert torch.tpu.memory_reserved() == torch.tpu.memory_allocated()
    del x
    assert torch.tpu.memory_allocated() == before
    assert torch.tpu.max_memory_allocated() == before + 4000
    assert torch.tpu.max_memory_reserved() == before + 4000
    s = stats()
    for key in ("allocated_bytes", "active_bytes", "reserved_bytes", "requested_bytes"):
        assert s[f"{key}.all.allocated"] == s[f"{key}.all.freed"] == 4000
    assert s["allocation.all.allocated"] == s["allocation.all.freed"] == 1
    assert s["num_ooms"] == s["num_alloc_retries"] == 0


def test_pools_are_split_at_a_mebibyte(stats):
    small = torch.empty(10, device="tpu")
    large = torch.empty(1 << 20, dtype=torch.uint8, device="tpu")
    s = stats()
    assert s["allocated_bytes.small_pool.allocated"] == small.nbytes
    assert s["allocated_bytes.large_pool.allocated"] == large.nbytes


def test_peak_restarts_from_the_current_value(stats):
    x = torch.empty(1000, device="tpu")
    y = torch.empty(1000, device="tpu")
    del y
    torch.tpu.reset_peak_memory_stats()
    assert torch.tpu.max_memory_allocated() == torch.tpu.memory_allocated()
    del x


def test_views_share_memory(stats):
    x = torch.empty(4, 6, device="tpu")
    before = torch.tpu.memory_allocated()
    views = [x.t(), x[1:], x.view(6, 4), x.unfold(1, 2, 2), x.view(torch.int32), x.detach()]
    assert torch.tpu.memory_allocated() == before
    assert {v.untyped_storage().data_ptr() for v in views} == {x.data_ptr()}
    assert x[1:].data_ptr() == x.data_ptr() + 24


def test_storage_resize_is_accounted(stats):
    x = torch.empty(100, device="tpu")
    before = torch.tpu.memory_allocated()
    x.untyped_storage().resize_(0)
    assert torch.tpu.memory_allocated() == before - 400
    x.untyped_storage().resize_(800)
    assert torch.tpu.memory_allocated() == before + 400
    assert x.untyped_storage().nbytes() == 800
    del x
    assert torch.tpu.memory_allocated() == before - 400


def test_addresses_do_not_overlap_and_know_their_device():
    tensors = [torch.empty(n, dtype=torch.uint8, device="tpu") for n in (0, 1, 255, 256, 257, 0, 5000)]
    for x in tensors:
        x.untyped_storage().resize_(x.nbytes + 300)
    ranges = sorted((x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()) for x in tensors)
    assert all(start % 256 == 0 and start > 0 for start, _ in ranges)
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(ranges))


def test_accounting_is_thread_safe(stats):
    before = torch.tpu.memory_allocated()

    def work():
        for _ in range(300):
            torch.empty(10, device="tpu")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.tpu.memory_allocated() == before
    assert stats()["allocation.all.allocated"] == 1200


def test_memory_of_each_device_is_its_own(two_devices):
    before = torch.tpu.memory_allocated(0), torch.tpu.memory_allocated(1)
    x = torch.empty(100, device="tpu:1")
    assert (torch.tpu.memory_allocated(0), torch.tpu.memory_allocated("tpu:1")) == (before[0], before[1] + x.nbytes)


def test_mem_get_info():
    free, total = torch.tpu.mem_get_info()
    assert 0 < free <= total
    assert torch.tpu.get_device_properties().total_memory == total


@pytest.mark.parametrize("abbreviated", [True, False])
def test_memory_summary(abbreviated):
    torch.tpu.init()
    text = torch.tpu.memory_summary(abbreviated=abbreviated)
    assert "Allocated memory" in text
    assert ("large pool" in text) != abbreviated


def test_pinned_memory():
    pageable = torch.empty(10)
    pinned = pageable.pin_memory()
    assert pinned.device.type == "cpu"
    assert pinned.is_pinned() and pinned[3:].is_pinned()
    assert not pageable.is_pinned()
    assert torch.empty(4, pin_memory=True).is_pinned()
    address = pinned.data_ptr()
    del pinned
    gc.collect()
    assert not any(t.is_pinned() for t in [torch.empty(10) for _ in range(20)] if t.data_ptr() == address)
    torch.accelerator.empty_host_cache()


def test_a_tpu_tensor_cannot_be_made_in_pinned_memory():
    with pytest.raises(RuntimeError, match="Only dense CPU tensors can be pinned"):
        torch.empty(3, device="tpu", pin_memory=True)
