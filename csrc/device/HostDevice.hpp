// Host memory: the caller's thread is the current stream, and asynchronous
// operations run on a worker.
#pragma once

#include <exception>
#include <utility>

#include "device/Device.hpp"
#include "device/WorkerStream.hpp"

namespace torchcomms_pg {

class HostDevice final : public Device {
 public:
  HostDevice()
      : Device(c10::Device(c10::DeviceType::CPU)),
        worker_("tcpg_worker"),
        callbacks_("tcpg_callbacks") {}

  void prepare() override { worker_.start(); }
  cudaStream_t stream(bool async) override { return async ? worker_.handle() : nullptr; }

  void run(cudaStream_t stream, std::function<void()> body) override {
    if (stream == nullptr) {
      body();
    } else {
      shm::HostStream::fromHandle(stream)->enqueue(std::move(body));
    }
  }

  void defer() override { worker_.defer(); }
  void wake() override { worker_.wake(); }
  void handOver() override { worker_.handOver(); }

  void runApart(std::function<void()> body) override {
    try {
      callbacks_.start();
    } catch (const std::exception&) {
      body();  // what it waits for may have to wait for it: better late than never
      return;
    }
    callbacks_.enqueue([this, body = std::move(body)] {
      callbacks_.handOver();
      body();
    });
  }

  void help(const std::function<bool()>& done) override { worker_.help(done); }

  std::unique_ptr<Device> another() const override { return std::make_unique<HostDevice>(); }

 private:
  WorkerStream worker_;
  WorkerStream callbacks_;
};

}  // namespace torchcomms_pg
