// Memory as PyTorch accounts for it. The bytes themselves belong to the values (jax.Array) that storages hold.
#include "callbacks.h"
#include "storage.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <limits>
#include <map>
#include <mutex>
#include <unordered_map>

namespace py = pybind11;

namespace torchtpu {
namespace {

using c10::CachingAllocator::StatType;
using c10::CachingDeviceAllocator::DeviceStats;

constexpr size_t kMaxDevices = 128;
constexpr size_t kSmall = size_t{1} << 20;  // PyTorch's border between its small and its large pool

// Addresses are handed out once and never again. They start where no host pointer can lie (non-canonical on x86-64 and arm64),
// so that a kernel of another backend which dereferences one stops at once; a chunk of them belongs to one device, which tells
// the device of an address without a table of allocations.
class AddressSpace {
 public:
  uintptr_t take(c10::DeviceIndex device, size_t nbytes) {
    const size_t size = (nbytes / kAlign + 1) * kAlign;  // at least one unit: empty storages have addresses of their own
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& free = free_[static_cast<size_t>(device)];
    if (free.end - free.next < size) {
      const size_t chunks = (size + kChunk - 1) / kChunk;
      free.next = kBase + owners_.size() * kChunk;
      free.end = free.next + chunks * kChunk;
      owners_.insert(owners_.end(), chunks, device);
    }
    const auto address = free.next;
    free.next += size;
    return address;
  }

  c10::DeviceIndex owner(uintptr_t address) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (address < kBase || (address - kBase) / kChunk >= owners_.size()) return -1;
    return owners_[(address - kBase) / kChunk];
  }

 private:
  static constexpr uintptr_t kAlign = 256;
  static constexpr uintptr_t kChunk = uintptr_t{1} << 40;
  static constexpr uintptr_t kBase = uintptr_t{1} << 60;
  struct Range {
    uintptr_t next = 0, end = 0;
  };
  mutable std::mutex mutex_;
  std::array<Range, kMaxDevices> free_;
  std::vector<c10::DeviceIndex> owners_;
};

// Cells by address: PyTorch sometimes makes a second storage from a data pointer (writing a storage to a file, DLPack).
class CellTable {
 public:
  void add(Cell* cell) {
    const std::lock_guard<std::mutex> lock(mutex_);
    cells_[cell->address] = cell;
  }
  void remove(const Cell* cell) {
    const std::lock_guard<std::mutex> lock(mutex_);
    cells_.erase(cell->address);
  }
  void each(const std::function<void(const Cell*)>& function) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [address, cell] : cells_) function(cell);
  }
  Cell* find(uintptr_t address) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = cells_.find(address);
    return found == cells_.end() ? nullptr : found->second;
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<uintptr_t, Cell*> cells_;
};

struct Statistics {
  std::mutex mutex;
  std::array<DeviceStats, kMaxDevices> devices;

  template <typename F>
  static void each_pool(size_t nbytes, F&& f) {
    f(static_cast<size_t>(StatType::AGGREGATE));
    f(static_cast<size_t>(nbytes < kSmall ? StatType::SMALL_POOL : StatType::LARGE_POOL));
  }

  static void grow(DeviceStats& s, size_t pool, size_t nbytes) {
    s.allocated_bytes[pool].increase(nbytes);
    s.active_bytes[pool].increase(nbytes);
    s.reserved_bytes[pool].increase(nbytes);
    s.requested_bytes[pool].increase(nbytes);
  }
  static void shrink(DeviceStats& s, size_t pool, size_t nbytes) {
    s.allocated_bytes[pool].decrease(nbytes);
    s.active_bytes[pool].decrease(nbytes);
    s.reserved_bytes[pool].decrease(nbytes);
    s.requested_bytes[pool].decrease(nbytes);
  }
  static void count(DeviceStats& s, size_t pool, bool more) {
    for (auto* stat : {&s.allocation[pool], &s.segment[pool], &s.active[pool]}) more ? stat->increase(1) : stat->decrease(1);
  }
};

// Leaked: storages may be released after static destructors have run.
AddressSpace& addresses() {
  static auto* space = new AddressSpace;
  return *space;
}
CellTable& cells() {
  static auto* table = new CellTable;
  return *table;
}
Statistics& statistics() {
  static auto* s = new Statistics;
  return *s;
}

void account(void* address, c10::DeviceIndex device, size_t nbytes, bool allocate) {
  auto& all = statistics();
  size_t total = 0;
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    auto& s = all.devices[static_cast<size_t>(device)];
    Statistics::each_pool(nbytes, [&](size_t pool) {
      allocate ? Statistics::grow(s, pool, nbytes) : Statistics::shrink(s, pool, nbytes);
      Statistics::count(s, pool, allocate);
    });
    ++(allocate ? s.num_device_alloc : s.num_device_free);
    total = static_cast<size_t>(s.allocated_bytes[0].current);
  }
  if (c10::memoryProfilingEnabled()) {
    const auto delta = static_cast<int64_t>(nbytes);
    c10::reportMemoryUsageToProfiler(address, allocate ? delta : -delta, total, total, {kTPU, device});
  }
}

void delete_cell(void* context) {
  auto* cell = static_cast<Cell*>(context);
  cells().remove(cell);
  account(cell, cell->device, cell->nbytes, false);
  if (cell->value != nullptr || cell->op != nullptr || cell->file != nullptr) {
    if (!interpreter_usable()) return;  // leaked: the value cannot be released any more
    py::gil_scoped_acquire gil;
    Py_XDECREF(cell->value);
    Py_XDECREF(cell->op);
    Py_XDECREF(cell->file);
  }
  delete cell;
}

class TpuAllocator final : public c10::DeviceAllocator {
 private:
  template <typename F>
  static auto with(c10::DeviceIndex device, F&& f) {
    const auto index = static_cast<size_t>(resolve_index(device));
    auto& all = statistics();
    const std::lock_guard<std::mutex> lock(all.mutex);
    return f(all.devices[index]);
  }
  template <typename F>
  static void each(DeviceStats& s, F&& f) {
    for (auto* stats : {&s.allocation, &s.segment, &s.active, &s.allocated_bytes, &s.reserved_bytes, &s.active_bytes,
                        &s.requested_bytes})
      for (auto& stat : *stats) f(stat);
  }

 public:
  c10::DataPtr allocate(size_t nbytes) override { return allocate_on(nbytes, current_device()); }
  void copy_data(void*, const void*, std::size_t) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "tpu storages cannot be copied by address; copy the tensor");
  }
  bool initialized() override { return is_initialised(); }
  void emptyCache(c10::MempoolId_t) override {}  // nothing is cached on this side
  void recordStream(const c10::DataPtr&, c10::Stream) override {}  // the runtime keeps a buffer until its last reader is done
  DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    return with(device, [](DeviceStats& s) { return s; });
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    with(device, [](DeviceStats& s) {
      each(s, [](auto& stat) { stat.reset_accumulated(); });
      s.num_alloc_retries = s.num_ooms = s.num_device_alloc = s.num_device_free = 0;
      return 0;
    });
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    with(device, [](DeviceStats& s) {
      each(s, [](auto& stat) { stat.reset_peak(); });
      return 0;
    });
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const auto index = resolve_index(device);
    ensure_initialised();
    py::gil_scoped_acquire gil;
    return callbacks().memory_info(index).cast<std::pair<size_t, size_t>>();
  }
};

// Host memory for transfers. Page-locking is the runtime's business; what PyTorch needs is to know its own pinned memory again.
class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    auto data = c10::GetCPUAllocator()->allocate(nbytes);
    void* address = data.get();
    if (address == nullptr) return data;
    auto* block = new Block{this, std::move(data)};
    const std::lock_guard<std::mutex> lock(mutex_);
    blocks_[reinterpret_cast<uintptr_t>(address)] = nbytes;
    active_.increase(nbytes);
    requests_.increase(1);
    return {address, block, &release, c10::Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override { default_copy_data(to, from, nbytes); }
  bool record_event(void*, void*, c10::Stream) override { return false; }  // transfers are done when copy_ returns
  void empty_cache() override {}
  at::HostStats get_stats() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    at::HostStats stats;
    stats.active_requests = stats.allocations = requests_;
    stats.active_bytes = stats.allocated_bytes = active_;
    stats.num_host_alloc = requests_.allocated;
    stats.num_host_free = requests_.freed;
    return stats;
  }
  void reset_accumulated_stats() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    active_.reset_accumulated();
    requests_.reset_accumulated();
  }
  void reset_peak_stats() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    active_.reset_peak();
    requests_.reset_peak();
  }
  bool contains(const void* pointer) {
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto after = blocks_.upper_bound(address);
    if (after == blocks_.begin()) return false;
    const auto& [start, nbytes] = *std::prev(after);
    return address - start < nbytes;
  }

 private:
  struct Block {
    PinnedAllocator* owner;
    c10::DataPtr data;
  };
  static void release(void* context) {
    auto* block = static_cast<Block*>(context);
    {
      auto* self = block->owner;
      const std::lock_guard<std::mutex> lock(self->mutex_);
      const auto found = self->blocks_.find(reinterpret_cast<uintptr_t>(block->data.get()));
      self->active_.decrease(found->second);
      self->requests_.decrease(1);
      self->blocks_.erase(found);
    }
    delete block;
  }
  std::mutex mutex_;
  std::map<uintptr_t, size_t> blocks_;
  c10::CachingAllocator::Stat active_, requests_;
};

TpuAllocator* const g_allocator = new TpuAllocator;
PinnedAllocator* const g_pinned = new PinnedAllocator;

}  // namespace

REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, g_allocator)
REGISTER_HOST_ALLOCATOR(c10::DeviceType::PrivateUse1, g_pinned)

c10::Allocator* allocator() { return g_allocator; }
c10::Allocator* pinned_allocator() { return g_pinned; }
bool is_pinned(const void* pointer) { return g_pinned->contains(pointer); }
c10::DeviceIndex device_of_address(const void* pointer) { return addresses().owner(reinterpret_cast<uintptr_t>(pointer)); }

c10::DataPtr allocate_on(size_t nbytes, c10::DeviceIndex device) {
  ensure_initialised();
  const auto index = resolve_index(device);
  TORCH_CHECK(nbytes <= static_cast<size_t>(std::numeric_limits<int64_t>::max() / 4), "a tensor cannot have ", nbytes, " bytes");
  auto* address = reinterpret_cast<void*>(addresses().take(index, nbytes));
  auto* cell = new Cell;
  cell->nbytes = nbytes;
  cell->device = index;
  cell->address = reinterpret_cast<uintptr_t>(address);
  if (nbytes >= kLarge) note_origin(cell);
  cells().add(cell);
  account(address, index, nbytes, true);
  return {address, cell, &delete_cell, c10::Device(kTPU, index)};
}

void for_each_cell(const std::function<void(const Cell*)>& function) { cells().each(function); }

size_t allocated_bytes(c10::DeviceIndex device) {
  auto& all = statistics();
  const std::lock_guard<std::mutex> lock(all.mutex);
  return static_cast<size_t>(all.devices.at(static_cast<size_t>(device)).allocated_bytes[0].current);
}

Cell* cell_of(const c10::StorageImpl* storage) {
  TORCH_CHECK(storage != nullptr, "the tensor has no storage");
  const auto& data = storage->data_ptr();
  if (data.get_deleter() == &delete_cell) return static_cast<Cell*>(data.get_context());
  auto* cell = storage->device_type() == kTPU ? cells().find(reinterpret_cast<uintptr_t>(data.get())) : nullptr;
  TORCH_CHECK(cell != nullptr, "expected the storage of a tpu tensor, got one on ", storage->device(),
      storage->device_type() == kTPU ? " whose memory has been released or was never allocated" : "");
  return cell;
}

void resize_cell(Cell* cell, size_t nbytes) {
  auto& all = statistics();
  const std::lock_guard<std::mutex> lock(all.mutex);
  auto& s = all.devices[static_cast<size_t>(cell->device)];
  Statistics::each_pool(cell->nbytes, [&](size_t pool) {
    Statistics::shrink(s, pool, cell->nbytes);
    Statistics::count(s, pool, false);
  });
  Statistics::each_pool(nbytes, [&](size_t pool) {
    Statistics::grow(s, pool, nbytes);
    Statistics::count(s, pool, true);
  });
  cell->nbytes = nbytes;
}

// The value keeps the extent it has: whoever reads it next sees that it covers fewer (or more) elements than the storage. Only
// an emptied storage loses its value, which is how FSDP gives the memory of a gathered parameter back.
void resize_storage(c10::StorageImpl* storage, size_t nbytes) {
  TORCH_CHECK(storage->resizable(), "Trying to resize storage that is not resizable");
  auto* cell = cell_of(storage);
  const auto before = cell->nbytes;
  if (nbytes == before) return storage->set_nbytes(nbytes);
  resize_cell(cell, nbytes);
  if (nbytes > before) {  // the old range of addresses is too short
    cells().remove(cell);
    cell->address = addresses().take(cell->device, nbytes);
    cells().add(cell);
    auto* address = reinterpret_cast<void*>(cell->address);
    auto old = storage->set_data_ptr(c10::DataPtr(address, cell, &delete_cell, c10::Device(kTPU, cell->device)));
    old.release_context();
  }
  storage->set_nbytes(nbytes);
  if (nbytes == 0 && cell->value != nullptr) {
    py::gil_scoped_acquire gil;
    auto* value = std::exchange(cell->value, nullptr);
    cell->shape.clear();
    Py_DECREF(value);
  }
}

}  // namespace torchtpu
