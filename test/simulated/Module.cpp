// Generators, the accelerator hooks, and the module _simulated.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <array>

#include "Device.hpp"
#include "Operators.hpp"

namespace py = pybind11;

namespace simulated {

namespace {

bool exists(c10::DeviceIndex device) {
  return device >= 0 && device < kDevices;
}

void checkExists(c10::DeviceIndex device) {
  TORCH_CHECK_VALUE(exists(device), "there is no device sim:", int{device});
}

// A CPU generator under a device's name.
class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(c10::DeviceIndex device)
      : Generator(device, at::detail::createCPUGenerator()) {}
  Generator(c10::DeviceIndex device, at::Generator host)
      : c10::GeneratorImpl(
            c10::Device(kType, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host_(std::move(host)) {}

  void set_current_seed(uint64_t seed) override { host_.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host_.set_offset(offset); }
  uint64_t get_offset() const override { return host_.get_offset(); }
  uint64_t current_seed() const override { return host_.current_seed(); }
  uint64_t seed() override { return host_.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    host_.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host_.unsafeGetGeneratorImpl()->get_state();
  }

  uint64_t draw() { return at::check_generator<at::CPUGeneratorImpl>(host_)->random64(); }

 private:
  Generator* clone_impl() const override { return new Generator(device().index(), host_.clone()); }

  at::Generator host_;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return defaultGenerator(device < 0 ? currentDevice() : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return newGenerator(device < 0 ? currentDevice() : device);
  }
  at::Device getDeviceFromPtr(void* data) const override {
    const auto device = deviceOf(data);
    TORCH_CHECK_VALUE(device >= 0, "this is not memory of a simulated device");
    return {kType, device};
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinnedAllocator(); }
  bool isPinnedPtr(const void* data) const override { return isPinned(data); }

  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { setDevice(device); }
  c10::DeviceIndex getCurrentDevice() const override { return currentDevice(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = currentDevice();
    setDevice(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exists(device) ? exchangeDevice(device) : currentDevice();
  }
};

// Holds a stream up until it is released, as a kernel would that waits.
class Hold {
 public:
  explicit Hold(Stream& stream) { wait(stream, mark_); }
  ~Hold() { mark_->set(); }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;
  void release() { mark_->set(); }

 private:
  std::shared_ptr<Mark> mark_ = std::make_shared<Mark>();
};

}  // namespace

const at::Generator& defaultGenerator(c10::DeviceIndex device) {
  static auto* const all =
      new std::array<at::Generator, kDevices>{newGenerator(0), newGenerator(1)};
  checkExists(device);
  return (*all)[device];
}

at::Generator newGenerator(c10::DeviceIndex device) {
  checkExists(device);
  return at::make_generator<Generator>(device);
}

uint64_t drawSeed(at::Generator& generator) {
  auto* const own = dynamic_cast<Generator*>(generator.unsafeGetGeneratorImpl());
  TORCH_CHECK_TYPE(own != nullptr, "sim: the generator is on ", generator.device());
  const std::lock_guard lock(own->mutex_);
  return own->draw();
}

}  // namespace simulated

PYBIND11_MODULE(_simulated, module) {
  using namespace simulated;
  using NoGil = py::call_guard<py::gil_scoped_release>;

  c10::SetAllocator(kType, allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks());

  const auto streamOf = [](c10::DeviceIndex device, c10::StreamId id) -> Stream& {
    return find(c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), id));
  };
  py::class_<Graph>(module, "Graph")
      .def(py::init())
      .def(
          "begin",
          [streamOf](Graph& self, c10::DeviceIndex device, c10::StreamId id) {
            streamOf(device, id).record(&self);
          },
          py::arg("device"), py::arg("stream_id"))
      .def(
          "end",
          [streamOf](Graph&, c10::DeviceIndex device, c10::StreamId id) {
            streamOf(device, id).record(nullptr);
          },
          py::arg("device"), py::arg("stream_id"))
      .def(
          "replay",
          [streamOf](const Graph& self, c10::DeviceIndex device, c10::StreamId id) {
            self.replay(streamOf(device, id));
          },
          py::arg("device"), py::arg("stream_id"), NoGil());
  py::class_<Hold>(module, "Hold").def("release", &Hold::release, NoGil());
  module.def(
      "hold",
      [streamOf](c10::DeviceIndex device, c10::StreamId id) {
        return std::make_unique<Hold>(streamOf(device, id));
      },
      py::arg("device"), py::arg("stream_id"));
  module.def(
      "set_delays",
      [](uint64_t seed, double probability, int64_t longest) {
        setDelays({seed, probability, std::chrono::microseconds(longest)});
      },
      py::arg("seed"), py::arg("probability"), py::arg("longest_us"));
  module.def("device_count", [] { return kDevices; });
  module.def("current_device", &currentDevice);
  module.def("set_device", &setDevice, py::arg("device"));
  module.def(
      "maybe_exchange_device",
      [](c10::DeviceIndex device) {
        return at::detail::getPrivateUse1Hooks().maybeExchangeDevice(device);
      },
      py::arg("device"));
  module.def("synchronize", &synchronizeDevice, py::arg("device"), NoGil());
  module.def("default_generator", &defaultGenerator, py::arg("device"));
  module.def("settled", &settled);
  module.def(
      "waits",
      [streamOf](c10::DeviceIndex device, c10::StreamId id) {
        return streamOf(device, id).waits();
      },
      py::arg("device"), py::arg("stream_id"));
  module.def("early_queries", &earlyQueries);
  module.def("device_calls", &deviceCalls);
  module.def("hang_driver", &hangDriver, py::arg("hangs"));
  module.def("high_priority_streams", &highPriorityStreams, py::arg("device"));
}
