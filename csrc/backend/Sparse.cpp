// All-reduce of sparse COO tensors. Ranks hold different numbers of values. So each rank pads its
// indices and values to the largest number, gathers the tensors of all ranks, and adds them up with
// coalesce(). Runs in the calling thread even if asynchronous: later steps need the sizes that the
// first step gathers.
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <utility>

#include "backend/Backend.hpp"
#include "backend/QueuedWork.hpp"
#include "collectives/Collectives.hpp"
#include "operation/Types.hpp"

namespace torchcomms_pg {

namespace {

at::Tensor gatherRows(
    Communicator& comm, const at::Tensor& rows, const Communicator::Options& options) {
  auto sizes = rows.sizes().vec();
  sizes.insert(sizes.begin(), comm.size());
  auto all = at::empty(sizes, rows.options());
  collectives::allGatherSingle(comm, options, all, rows);
  return all;
}

// Returns `rows` with zero rows appended up to `count`.
at::Tensor padded(const at::Tensor& rows, int64_t count) {
  auto sizes = rows.sizes().vec();
  sizes[0] = count;
  auto result = at::zeros(sizes, rows.options());
  result.narrow(0, 0, rows.size(0)).copy_(rows);
  return result;
}

}  // namespace

Backend::WorkPtr Backend::allreduce_sparse(
    TensorList& tensors, const c10d::AllreduceOptions& opts) {
  constexpr const char* kWhat = "all_reduce (sparse)";
  TORCH_CHECK_VALUE(tensors.size() == 1, kWhat, ": got ", tensors.size(), " tensors, wanted one");
  auto& tensor = tensors.front();
  TORCH_CHECK_VALUE(
      tensor.layout() == at::kSparse, kWhat, ": tensor has layout ", tensor.layout(),
      ", wanted sparse COO");
  TORCH_CHECK_VALUE(
      opts.reduceOp == c10d::ReduceOp::SUM, kWhat, ": reduce op ",
      torchcomms_pg::name(opts.reduceOp), " is not supported, wanted SUM");
  const auto held = route(kWhat, tensor);
  auto& comm = *held;
  TORCH_CHECK(
      !comm.batches().open(), kWhat,
      ": it takes several operations, each of which needs the one before, and a batch launches "
      "nothing before its end; call it outside of the coalescing context");
  const auto options = optionsOf(/*async=*/false, opts.timeout);
  at::AutoDispatchBelowAutograd guard;
  const auto input = tensor.coalesce();
  const auto indices = input.indices().t().contiguous();  // one row per value
  const auto values = input.values().contiguous();

  std::vector<int64_t> shape = input.sizes().vec();
  shape.push_back(input.sparse_dim());
  shape.push_back(values.size(0));
  const auto shapes =
      gatherRows(comm, at::tensor(shape, at::kLong).to(comm.device()), options).cpu();
  const auto last = static_cast<int64_t>(shape.size()) - 1;
  const auto counts = shapes.select(1, last);
  for (int rank = 0; rank < comm.size(); ++rank) {
    TORCH_CHECK_VALUE(
        shapes[rank].narrow(0, 0, last).equal(shapes[comm.rank()].narrow(0, 0, last)), kWhat,
        ": rank ", rank, " has a tensor of another shape or number of sparse dimensions than rank ",
        comm.rank(), " (shape ", tensor.sizes(), ")");
  }
  const auto longest = counts.max().item<int64_t>();
  const auto allIndices = gatherRows(comm, padded(indices, longest), options);
  const auto allValues = gatherRows(comm, padded(values, longest), options);
  std::vector<at::Tensor> partIndices;
  std::vector<at::Tensor> partValues;
  for (int rank = 0; rank < comm.size(); ++rank) {
    const auto count = counts[rank].item<int64_t>();
    partIndices.push_back(allIndices[rank].narrow(0, 0, count));
    partValues.push_back(allValues[rank].narrow(0, 0, count));
  }
  const auto sum = at::sparse_coo_tensor(
                       at::cat(partIndices).t().contiguous(), at::cat(partValues), tensor.sizes(),
                       tensor.options())
                       .coalesce();
  tensor.copy_(sum);
  if (!opts.asyncOp) {
    return nullptr;
  }
  if (comm.device() == at::kCPU) {
    return comm.finishedWork(OpKind::allReduce, {tensor});
  }
  return c10::make_intrusive<QueuedWork>(TensorList{tensor});
}

}  // namespace torchcomms_pg
