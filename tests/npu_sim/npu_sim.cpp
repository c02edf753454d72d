// A simulated accelerator named "npu": PyTorch's PrivateUse1 backend over host memory.
//
// What it keeps of a real NPU, because code goes wrong there and nowhere else:
//   * Device addresses are not host addresses: bit 54 is set, which lies above what processes map on x86-64 and
//     AArch64 (and below the byte AArch64 ignores), so that host code that reads device memory dies, as it would
//     beside a real device.
//   * Fresh memory holds 0xFF bytes: NaN in every floating type, -1 in the integers.
//   * Operands of different devices are refused.
//   * Events complete only when somebody waits, and time is a clock that tests may set.
//   * A launch that fails says nothing: the queue's thread finds out, the next call that queues something raises, once,
//     and from then on all work is dropped in silence and events never come, until `revive`, as until a restart.
//   * Want of memory is a plain RuntimeError.
//   * Freed memory may be handed out again with what it held (`recycle`).
//   * A process that is forked after the first use cannot use the device.
// Operators without a kernel here run on the CPU through ATen's boxed fallback.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/NativeFunctions.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <pthread.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 16;
constexpr uintptr_t kDeviceBit = uintptr_t(1) << 54;

std::atomic<int> device_count{1};
thread_local c10::DeviceIndex current_device = 0;
thread_local std::array<c10::StreamId, kMaxDevices> current_stream{};

c10::Device device_or_current(std::optional<c10::Device> device) {
  return {kType, device && device->has_index() ? device->index() : current_device};
}

void check_device(int64_t index) {
  const int count = device_count;
  TORCH_CHECK(index >= 0 && index < count, "npu_sim: no device npu:", index, ", there are ", count);
}

// ---- First use and forks ---------------------------------------------------------------------------------------

std::atomic<bool> initialized{false};
std::atomic<bool> bad_fork{false};

void lazy_init() {
  TORCH_CHECK(
      !bad_fork, "Cannot re-initialize NPU in forked subprocess. To use NPU with multiprocessing, you must use the "
      "'spawn' start method");
  initialized = true;
}

// ---- Time, streams, events -------------------------------------------------------------------------------------

std::atomic<bool> wall_clock{true};
std::atomic<double> advanced_ms{0.0};
std::atomic<double> copy_ms{0.0};
std::atomic<bool> capturing{false};
std::atomic<int64_t> sync_count{0};

double now_ms() {
  const std::chrono::duration<double, std::milli> wall = std::chrono::steady_clock::now().time_since_epoch();
  return advanced_ms + (wall_clock ? wall.count() : 0.0);
}

// ---- The queue between the host and a device -------------------------------------------------------------------

using Clock = std::chrono::steady_clock;

struct Queue {
  enum State { works, failed, silent };
  std::mutex mutex;
  State state = works;
  std::string error;
  bool occupied = false;
  Clock::time_point until;

  void look() {
    if (occupied && Clock::now() >= until) {
      occupied = false;
      state = failed;
    }
  }
  // Whether what it is given now is done: not after a failure, and not behind a kernel that does not end.
  bool runs() {
    std::lock_guard lock(mutex);
    look();
    return state == works && !occupied;
  }
  // What every call does that queues something.
  void enter() {
    std::lock_guard lock(mutex);
    look();
    if (state != failed) return;
    state = silent;
    TORCH_CHECK(false, error);
  }
  void fail(const std::string& text) {
    std::lock_guard lock(mutex);
    if (state == works && !occupied) state = failed, error = text;
  }
  void occupy(double seconds, const std::string& text) {
    std::lock_guard lock(mutex);
    if (state != works || occupied) return;
    occupied = true;
    until = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    error = text;
  }
  void wait() {
    std::unique_lock lock(mutex);
    if (!occupied) return;
    const auto end = until;
    lock.unlock();
    std::this_thread::sleep_until(end);
  }
  void revive() {
    std::lock_guard lock(mutex);
    state = works;
    occupied = false;
  }
};
Queue& queue(int device) {
  static auto* const all = new std::array<Queue, kMaxDevices>;
  return (*all)[device];
}

// Every record and every wait draws a ticket: an event is complete when a wait that covers it came later.
struct Timeline {
  std::mutex mutex;
  int64_t ticket = 0;
  std::array<int64_t, kMaxDevices> device_waited{};
  std::map<std::pair<int, c10::StreamId>, int64_t> stream_waited;

  int64_t record() {
    std::lock_guard lock(mutex);
    return ++ticket;
  }
  void wait(int device, std::optional<c10::StreamId> stream) {
    TORCH_CHECK(!capturing, "npu_sim: operation not permitted while a stream is capturing: synchronize");
    lazy_init();
    ++sync_count;
    queue(device).wait();
    queue(device).enter();
    if (!queue(device).runs()) return;  // it says nothing and waits for nothing
    std::lock_guard lock(mutex);
    (stream ? stream_waited[{device, *stream}] : device_waited[device]) = ++ticket;
  }
  bool covers(int device, c10::StreamId stream, int64_t recorded) {
    std::lock_guard lock(mutex);
    return device_waited[device] > recorded || stream_waited[{device, stream}] > recorded;
  }
};
Timeline& timeline() {
  static auto* const instance = new Timeline;  // never destroyed: events may outlive static destructors
  return *instance;
}

struct Event {
  double ms;
  int64_t ticket;
  int device;
  c10::StreamId stream;
  bool complete;

  bool update() { return complete = complete || timeline().covers(device, stream, ticket); }
};

// ---- Memory ----------------------------------------------------------------------------------------------------

void* flip(const void* address) {
  return address ? reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(address) ^ kDeviceBit) : nullptr;
}

struct Memory final : c10::DeviceAllocator {
  struct Block {
    size_t bytes;
    c10::DeviceIndex device;
  };
  std::mutex mutex;
  std::map<uintptr_t, Block> live;  // by device address
  std::array<size_t, kMaxDevices> used{}, peak{}, total{}, cached{};
  std::map<std::pair<int, size_t>, std::vector<void*>> freed;  // host addresses by device and block size
  std::atomic<bool> recycling{false};

  static size_t block_bytes(size_t bytes) { return (bytes + 511) / 512 * 512; }

  c10::DataPtr allocate(size_t bytes) override {
    lazy_init();
    const auto device = current_device;
    if (bytes == 0) return {nullptr, nullptr, &release, {kType, device}};
    std::lock_guard lock(mutex);
    if (bytes > free(device)) drop_freed();
    const auto mib = [](size_t size) { return std::to_string(size >> 20) + " MiB"; };
    TORCH_CHECK(
        bytes <= free(device), "NPU out of memory. Tried to allocate ", mib(bytes), " (NPU ", int(device), "; ",
        mib(total[device]), " total capacity; ", mib(used[device]), " already allocated; ", mib(free(device)),
        " free) If reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation.");
    const auto size = block_bytes(bytes);
    auto& again = freed[{device, size}];
    void* host = nullptr;
    if (again.empty()) {
      host = c10::alloc_cpu(size);
      std::memset(host, 0xFF, size);
    } else {
      host = again.back();
      again.pop_back();
      cached[device] -= size;
    }
    live[reinterpret_cast<uintptr_t>(flip(host))] = {bytes, device};
    used[device] += bytes;
    peak[device] = std::max(peak[device], used[device]);
    return {flip(host), flip(host), &release, {kType, device}};
  }
  static void release(void* address);
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(flip(to), flip(from), bytes); }

  // Turns device addresses into host addresses in place, as a device's own load and store units would: each
  // must lie with its whole element inside one live allocation of the device that runs the kernel.
  void translate(int64_t* addresses, const bool* mask, int64_t count, int64_t bytes, c10::DeviceIndex device) {
    std::lock_guard lock(mutex);
    uintptr_t begin = 1, end = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (!mask[i]) continue;
      const auto address = static_cast<uintptr_t>(addresses[i]);
      if (address < begin || address + bytes > end) {
        const auto block = find(address, bytes, device);
        begin = block->first;
        end = begin + block->second.bytes;
      }
      addresses[i] = static_cast<int64_t>(address ^ kDeviceBit);
    }
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    std::lock_guard lock(mutex);
    drop_freed();
  }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard lock(mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes}) {
      (*bytes)[0].current = static_cast<int64_t>(used[device]);
      (*bytes)[0].peak = static_cast<int64_t>(peak[device]);
    }
    stats.reserved_bytes[0].current += static_cast<int64_t>(cached[device]);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard lock(mutex);
    peak[device] = used[device];
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard lock(mutex);
    return {free(device), total[device]};
  }

 private:
  size_t free(c10::DeviceIndex device) const {
    return total[device] - std::min(used[device] + cached[device], total[device]);
  }
  void drop_freed() {
    for (auto& [where, blocks] : freed)
      for (void* host : blocks) c10::free_cpu(host);
    freed.clear();
    cached.fill(0);
  }

  std::map<uintptr_t, Block>::const_iterator find(uintptr_t address, int64_t bytes, c10::DeviceIndex device) {
    TORCH_CHECK(address & kDeviceBit, "npu_sim: a kernel on npu:", int(device), " was given a host address");
    auto block = live.upper_bound(address);
    TORCH_CHECK(block != live.begin(), "npu_sim: a kernel touches an address that is not allocated");
    --block;
    const auto offset = address - block->first;
    TORCH_CHECK(
        offset + bytes <= block->second.bytes, "npu_sim: a kernel touches ", bytes, " bytes at offset ", offset,
        " of the nearest allocation below, which has ", block->second.bytes, " bytes");
    TORCH_CHECK(
        block->second.device == device, "npu_sim: a kernel on npu:", int(device), " touches memory of npu:",
        int(block->second.device));
    return block;
  }
};

Memory& memory() {
  static auto* const instance = new Memory;  // never destroyed: tensors may outlive static destructors
  return *instance;
}

void Memory::release(void* address) {
  if (!address) return;
  auto& self = memory();
  std::lock_guard lock(self.mutex);
  const auto block = self.live.find(reinterpret_cast<uintptr_t>(address));
  const auto [bytes, device] = block->second;
  self.used[device] -= bytes;
  self.live.erase(block);
  if (!self.recycling) return c10::free_cpu(flip(address));
  const auto size = block_bytes(bytes);
  self.freed[{device, size}].push_back(flip(address));
  self.cached[device] += size;
}

const auto allocator_registered = [] { c10::SetAllocator(kType, &memory()); return true; }();

// ---- The device guard: what torch asks of a backend's runtime -------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kType;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  static c10::Stream stream_on(c10::Device device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, device_or_current(device), id);
  }
  static c10::StreamId fresh_stream() {
    static std::atomic<c10::StreamId> next{1};
    return next++;
  }
  static Event* cast(void* event) { return static_cast<Event*>(event); }

  c10::DeviceType type() const override { return kType; }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count.load()); }
  c10::Device getDevice() const override { return {kType, current_device}; }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
  void setDevice(c10::Device device) const override {
    check_device(device.index());
    current_device = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Stream getStream(c10::Device device) const override {
    return stream_on(device, current_stream[device_or_current(device).index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_on(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream_on(device, fresh_stream()); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_on(stream.device(), std::exchange(current_stream[stream.device_index()], stream.id()));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  bool queryStream(const c10::Stream&) const override { return true; }
  bool isStreamCapturing(const c10::Stream&) const override { return capturing; }
  void synchronizeStream(const c10::Stream& stream) const override {
    timeline().wait(stream.device_index(), stream.id());
  }
  void synchronizeDevice(c10::DeviceIndex device) const override { timeline().wait(device, std::nullopt); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    lazy_init();
    queue(stream.device_index()).enter();
    if (!*event) *event = new Event;
    *cast(*event) = {now_ms(), timeline().record(), stream.device_index(), stream.id(), false};
  }
  void block(void*, const c10::Stream&) const override {}
  // The first question after a record is answered "not yet", so that code that never waits is found out.
  bool queryEvent(void* event) const override {
    if (!event || cast(event)->update()) return true;
    cast(event)->complete = queue(cast(event)->device).runs();
    return false;
  }
  void synchronizeEvent(void* event) const override {
    TORCH_CHECK(!capturing, "npu_sim: operation not permitted while a stream is capturing: event synchronize");
    if (!event) return;
    ++sync_count;
    auto& its = queue(cast(event)->device);
    its.wait();
    its.enter();
    cast(event)->complete = cast(event)->complete || its.runs();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete cast(event); }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    return cast(end)->ms - cast(begin)->ms;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---- Random numbers and the hooks ------------------------------------------------------------------------------

struct DeviceGenerator final : at::CPUGeneratorImpl {
  explicit DeviceGenerator(c10::DeviceIndex device) {
    device_ = {kType, device};
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

at::Generator& generator(c10::DeviceIndex device) {
  static auto* const all = new std::array<at::Generator, kMaxDevices>;
  auto& one = (*all)[device < 0 ? current_device : device];
  if (!one.defined()) one = at::make_generator<DeviceGenerator>(device < 0 ? current_device : device);
  return one;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count.load()); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<DeviceGenerator>(device < 0 ? current_device : device);
  }
  at::Device getDeviceFromPtr(void* address) const override {
    auto& all = memory();
    std::lock_guard lock(all.mutex);
    const auto block = all.live.upper_bound(reinterpret_cast<uintptr_t>(address));
    TORCH_CHECK(block != all.live.begin(), "npu_sim: not a device address");
    return {kType, std::prev(block)->second.device};
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const c10::DeviceGuard guard(storage.device());
    auto fresh = memory().allocate(bytes);
    if (const auto kept = std::min(bytes, storage.nbytes())) memory().copy_data(fresh.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

// ---- The kernels a backend must have ---------------------------------------------------------------------------

using at::IntArrayRef;
using at::Tensor;
template <class T>
using Opt = std::optional<T>;

// The copies a fallback makes belong to the simulation: they neither wait nor take device time.
thread_local bool in_fallback = false;
struct FallbackScope {
  bool before = std::exchange(in_fallback, true);
  ~FallbackScope() { in_fallback = before; }
};

void host_waits() { timeline().wait(current_device, current_stream[current_device]); }

Tensor empty(
    IntArrayRef sizes, Opt<c10::ScalarType> dtype, Opt<c10::Layout>, Opt<c10::Device> device, Opt<bool>,
    Opt<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_generic(
      sizes, &memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    IntArrayRef sizes, IntArrayRef strides, Opt<c10::ScalarType> dtype, Opt<c10::Layout>, Opt<c10::Device> device,
    Opt<bool>) {
  const c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_strided_generic(
      sizes, strides, &memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

// A CPU tensor over the same memory.
Tensor host_alias(const Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  auto alias = at::from_blob(
      flip(tensor.data_ptr()), tensor.sizes(), tensor.strides(), [tensor](void*) {}, tensor.options().device(c10::kCPU),
      c10::Device(c10::kCPU));
  alias._set_conj(tensor.is_conj());
  alias._set_neg(tensor.is_neg());
  return alias;
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  auto& its = queue(to.is_cpu() ? from.get_device() : to.get_device());
  if (!in_fallback) its.enter();
  // What is dropped leaves memory as it was.
  if (to.is_cpu() || its.runs()) host_alias(to).copy_(host_alias(from));
  if (in_fallback) return to;
  if (to.is_cpu() && !non_blocking) host_waits();
  if (!to.is_cpu() && !from.is_cpu()) advanced_ms.fetch_add(copy_ms);
  return to;
}

const Tensor& resize_(const Tensor& self, IntArrayRef sizes, Opt<c10::MemoryFormat>) {
  const auto bytes = at::detail::computeStorageNbytesContiguous(sizes, self.dtype().itemsize(), self.storage_offset());
  if (bytes > self.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (from.sizes() != to.sizes()) resize_(to, from.sizes(), {});
  return copy_from(from, to, false);
}

// As on a device: all operands on one device, except zero-dimensional CPU tensors and CPU index tensors.
void check_one_device(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  Opt<c10::Device> seen;
  const auto check = [&](const Tensor& tensor) {
    if (!tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0)) return;
    TORCH_CHECK(
        !seen || *seen == tensor.device(), "Expected all tensors to be on the same device, but found at least two ",
        "devices, ", seen->str(), " and ", tensor.device().str(), "! (in ", op.schema().name(), ")");
    seen = tensor.device();
  };
  for (const auto& argument : arguments) {
    if (argument.isTensor()) check(argument.toTensor());
    else if (argument.isTensorList())
      for (const Tensor& tensor : argument.toTensorVector()) check(tensor);
  }
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const std::set<std::string> waits_for_the_device{
      "aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select"};
  const auto& formals = op.schema().arguments();
  const auto first = stack->size() - formals.size();
  check_one_device(op, c10::ArrayRef<c10::IValue>(*stack).slice(first));
  if (!in_fallback) queue(current_device).enter();
  if (!in_fallback && waits_for_the_device.count(op.schema().name())) host_waits();

  // CPU kernels want a CPU generator: they get a copy of the device's, and its state is read back.
  at::Generator device_generator, host_generator;
  for (size_t i = 0; i < formals.size(); ++i) {
    if (formals[i].type()->str().find("Generator") == std::string::npos) continue;
    auto& actual = (*stack)[first + i];
    device_generator = actual.isNone() ? generator(-1) : actual.toGenerator();
    host_generator = at::detail::createCPUGenerator();
    host_generator.set_state(device_generator.get_state());
    actual = host_generator;
  }
  const FallbackScope scope;
  at::native::cpu_fallback(op, stack);
  if (device_generator.defined()) device_generator.set_state(host_generator.get_state());
}

void translate(Tensor addresses, const Tensor& mask, int64_t bytes) {
  TORCH_CHECK(addresses.is_contiguous() && mask.is_contiguous() && addresses.numel() == mask.numel());
  memory().translate(
      addresses.mutable_data_ptr<int64_t>(), mask.const_data_ptr<bool>(), addresses.numel(), bytes, current_device);
}

void set_total_memory(int64_t bytes) {
  memory().emptyCache({});
  std::lock_guard lock(memory().mutex);
  memory().total.fill(static_cast<size_t>(bytes));
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &::empty);
  m.impl("empty_strided", &::empty_strided);
  m.impl("_copy_from", &::copy_from);
  m.impl("_copy_from_and_resize", &::copy_from_and_resize);
  m.impl("resize_", &::resize_);
  m.impl("record_stream", [](Tensor&, c10::Stream) {});
  // Views share memory, which a fallback through the host cannot.
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("view.dtype", at::native::view_dtype);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, at::Storage)>(at::native::set_));
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SINGLE_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
  AT_FORALL_FP32(SINGLE_PRECISION)
}

TORCH_LIBRARY(npu_sim, m) {
  m.def("install(int devices, int total_memory) -> ()", [](int64_t devices, int64_t total_memory) {
    TORCH_CHECK(
        devices >= 1 && devices <= kMaxDevices, "npu_sim: between 1 and ", kMaxDevices, " devices, got ", devices);
    device_count = static_cast<int>(devices);
    set_total_memory(total_memory);
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    pthread_atfork(nullptr, nullptr, [] { bad_fork = bad_fork || initialized; });
  });
  m.def("device_count() -> int", []() -> int64_t { return device_count; });
  m.def("lazy_init() -> ()", &::lazy_init);
  m.def("is_initialized() -> bool", []() -> bool { return initialized && !bad_fork; });
  m.def("in_bad_fork() -> bool", []() -> bool { return bad_fork; });
  m.def("recycle(bool on) -> ()", [](bool on) { memory().recycling = on; });
  m.def("empty_cache() -> ()", []() { memory().emptyCache({}); });
  m.def("cached(int device) -> int", [](int64_t device) -> int64_t {
    std::lock_guard lock(memory().mutex);
    return static_cast<int64_t>(memory().cached[device]);
  });
  m.def("enter(int device) -> bool", [](int64_t device) -> bool {
    lazy_init();
    queue(device).enter();
    return queue(device).runs();
  });
  m.def("fail(int device, str error) -> ()", [](int64_t device, std::string error) { queue(device).fail(error); });
  m.def("occupy(int device, float seconds, str error) -> ()", [](int64_t device, double seconds, std::string error) {
    queue(device).occupy(seconds, error);
  });
  m.def("wait_for_the_end(int device) -> ()", [](int64_t device) { queue(device).wait(); });
  m.def("revive(int device) -> ()", [](int64_t device) { queue(device).revive(); });
  m.def("set_total_memory(int bytes) -> ()", &::set_total_memory);
  m.def("use_wall_clock(bool on) -> ()", [](bool on) { wall_clock = on; });
  m.def("advance(float ms) -> ()", [](double ms) { advanced_ms.fetch_add(ms); });
  m.def("now_ms() -> float", &::now_ms);
  m.def("set_copy_cost(float ms) -> ()", [](double ms) { copy_ms = ms; });
  m.def("set_capturing(bool on) -> ()", [](bool on) { capturing = on; });
  m.def("is_capturing() -> bool", []() -> bool { return capturing; });
  m.def("sync_count() -> int", []() -> int64_t { return sync_count; });
  m.def("manual_seed(int device, int seed) -> ()", [](int64_t device, int64_t seed) {
    generator(c10::DeviceIndex(device)).set_current_seed(seed);
  });
  m.def("initial_seed(int device) -> int", [](int64_t device) {
    return int64_t(generator(c10::DeviceIndex(device)).current_seed());
  });
  m.def("rng_state(int device) -> Tensor", [](int64_t device) {
    return generator(c10::DeviceIndex(device)).get_state();
  });
  m.def("set_rng_state(int device, Tensor state) -> ()", [](int64_t device, const Tensor& state) {
    generator(c10::DeviceIndex(device)).set_state(state);
  });
  m.def("translate(Tensor(a!) addresses, Tensor mask, int bytes) -> ()", &::translate);
}
