// The numbers of the fake GPU: aten's CUDA kernels are replaced by functions that call the CPU's on the same memory.
//
// Registered when it is loaded (fake_gpu.py). A kernel is done when it returns, if its stream has nothing else to do; else
// it is queued, and the host goes on with results whose numbers come later. Allocations, views, copies to and from the host, and what waits for a number (`item()`) are CUDA's own.
#include <ATen/TensorOperators.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/core/DeviceGuard.h>

#include <array>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

extern "C" int fake_launch();  // device.c
extern "C" void fake_fault();
extern "C" unsigned long fake_push(void* stream, int (*advance)(void*), void* argument);

namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

// A CUDA tensor's memory as a CPU tensor. Its storage can grow, as an `out` argument's has to: not in place.
Tensor on_cpu(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda() || tensor.layout() != at::kStrided)
    return tensor;
  const auto offset = tensor.storage_offset() * tensor.itemsize();
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(),
      tensor.storage().nbytes() - std::min<size_t>(offset, tensor.storage().nbytes()),
      at::DataPtr(tensor.mutable_data_ptr(), at::kCPU),
      c10::GetCPUAllocator(),
      /*resizable=*/true);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return alias;
}

// What the CPU has computed, on the GPU.
Tensor on_gpu(const Tensor& tensor, at::Device device) {
  if (!tensor.defined() || !tensor.is_cpu() || tensor.layout() != at::kStrided)
    return tensor;
  auto copy = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device));
  std::memcpy(copy.mutable_data_ptr(), tensor.const_data_ptr(), copy.storage().nbytes());
  return copy;
}

IValue map_tensors(const IValue& value, const std::function<Tensor(const Tensor&)>& map) {
  if (value.isTensor())
    return map(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> mapped;
    for (const Tensor& tensor : value.toTensorList())
      mapped.push_back(map(tensor));
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> mapped;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorList())
      mapped.push_back(tensor ? std::optional(map(*tensor)) : std::nullopt);
    return mapped;
  }
  return value;
}

// A generator of the CPU that gives other numbers each time, as the GPU's state says, which goes on.
at::Generator generator_for(const IValue& given, at::Device device) {
  auto gpus = given.isNone() ? at::globalContext().defaultGenerator(device) : given.toGenerator();
  if (gpus.device().is_cpu())
    return gpus;
  std::lock_guard<std::mutex> lock(gpus.mutex());
  const auto offset = gpus.get_offset();
  gpus.set_offset(offset + 4);
  return at::detail::createCPUGenerator(gpus.current_seed() + offset * 0x9E3779B97F4A7C15);
}

struct Call {
  const c10::OperatorHandle& op;
  std::vector<IValue> given;
  at::Device device;

  // The arguments on another device.
  Stack arguments_on(at::DeviceType other, const std::function<Tensor(const Tensor&)>& map) const {
    Stack stack;
    const auto& arguments = op.schema().arguments();
    for (size_t i = 0; i < given.size(); i++) {
      if (arguments[i].name() == "generator" && other == at::kCPU)
        stack.emplace_back(generator_for(given[i], device));
      else if (given[i].isDevice())
        stack.emplace_back(at::Device(other));
      else
        stack.push_back(map_tensors(given[i], map));
    }
    return stack;
  }

  // The argument that a result is, or nothing.
  const IValue* written(size_t result) const {
    const auto* alias = op.schema().returns()[result].alias_info();
    for (size_t i = 0; alias && i < given.size(); i++)
      if (const auto* other = op.schema().arguments()[i].alias_info(); other && other->beforeSets() == alias->beforeSets())
        return &given[i];
    return nullptr;
  }
};

// The GPU of the call: its first CUDA tensor's, or the one that it names. A tensor of another device is an error, as it is
// for CUDA's kernels, unless it is a number.
at::Device device_of(const std::string& name, const std::vector<IValue>& given) {
  std::optional<at::Device> found, named;
  for (const auto& value : given) {
    if (value.isDevice())
      named = value.toDevice();
    map_tensors(value, [&](const Tensor& tensor) {
      if (tensor.defined() && tensor.is_cuda() && !found)
        found = tensor.device();
      return tensor;
    });
  }
  for (const auto& value : given)
    if (found && name != "aten::copy_" && value.isTensor() && value.toTensor().defined()) {
      const auto other = value.toTensor().device();
      TORCH_CHECK(
          other == *found || value.toTensor().dim() == 0,
          "Expected all tensors to be on the same device, but found at least two devices, ", *found, " and ", other, "!");
    }
  if (!found && named && named->has_index())
    found = named;
  return found.value_or(c10::impl::VirtualGuardImpl(at::kCUDA).getDevice());
}

// Is it what a kernel asserts on the device, and not a check on the host?
bool is_device_assert(const char* message) {
  const std::string text = message;
  return text.find("out of bounds") != text.npos || text.find("index out of range") != text.npos;
}

void fault(const c10::OperatorHandle& op, const char* message) {
  std::fprintf(stderr, "%s: block: [0,0,0], thread: [0,0,0] Assertion `%s` failed.\n", op.schema().name().c_str(), message);
  fake_fault();
}

Stack compute_now(const Call& call) {
  std::vector<std::pair<Tensor, Tensor>> aliases;  // of CUDA tensors, and the CPU's
  const auto run = [&](bool without_indices) {
    aliases.clear();
    auto stack = call.arguments_on(at::kCPU, [&](const Tensor& tensor) {
      auto alias = on_cpu(tensor);
      if (without_indices && alias.defined() && at::isIntegralType(alias.scalar_type(), /*includeBool=*/false))
        return at::zeros_like(alias);
      if (tensor.defined() && tensor.is_cuda() && alias.is_cpu())
        aliases.emplace_back(tensor, alias);
      return alias;
    });
    call.op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    return stack;
  };
  Stack results;
  bool faulty = false;
  try {
    results = run(false);
  } catch (const c10::Error& error) {
    if (!is_device_assert(error.what_without_backtrace()))
      throw;
    // The results of a kernel with a wrong index are anything, but have a shape: here those of the index 0.
    faulty = true;
    results = run(true);
  }
  for (auto& [tensor, alias] : aliases) {  // an `out` argument may have got another shape, and with it other memory
    if (tensor.sizes() != alias.sizes() || tensor.strides() != alias.strides()) {
      tensor.resize_(alias.sizes());
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides());
    }
    if (alias.const_data_ptr() != tensor.const_data_ptr())
      std::memcpy(tensor.mutable_data_ptr(), alias.const_data_ptr(), alias.storage().nbytes());
  }
  for (size_t i = 0; i < results.size(); i++) {
    const auto* written = call.written(i);
    results[i] = written ? *written : map_tensors(results[i], [&](const Tensor& tensor) {
      return on_gpu(tensor, call.device);
    });
  }
  if (faulty)
    fault(call.op, "index out of bounds");
  return results;
}

// A kernel in a stream's queue.
struct Queued {
  c10::OperatorHandle op;
  Stack stack;                   // of the CPU
  std::vector<Tensor> targets;   // of its results; undefined for those that are arguments
  std::vector<c10::Storage> used;
};
std::mutex finished_lock;
std::vector<std::unique_ptr<Queued>> finished;  // to free memory is the host's: CUDA's allocator may be waiting for the stream

int advance_kernel(void* argument) {
  std::unique_ptr<Queued> queued(static_cast<Queued*>(argument));
  const at::AutoDispatchBelowADInplaceOrView guard;
  try {
    queued->op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &queued->stack);
    size_t number = 0;
    for (const auto& result : queued->stack)
      map_tensors(result, [&](const Tensor& tensor) {
        if (const auto& target = queued->targets.at(number++); target.defined() && tensor.defined())
          target.copy_(tensor);
        return tensor;
      });
  } catch (const std::exception& error) {
    const std::string message = error.what();
    fault(queued->op, message.substr(0, message.find('\n')).c_str());
  }
  const std::lock_guard<std::mutex> lock(finished_lock);
  finished.push_back(std::move(queued));
  return true;
}

// Queue it, if its results' shapes can be told without its numbers.
std::optional<Stack> queue(const Call& call, void* stream) {
  if (!call.op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta))
    return std::nullopt;
  std::vector<std::pair<Tensor, Tensor>> shapes;
  auto results = call.arguments_on(at::kMeta, [&](const Tensor& tensor) {
    if (!tensor.defined())
      return tensor;
    auto shape = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
    shapes.emplace_back(tensor, shape);
    return shape;
  });
  try {
    call.op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &results);
  } catch (const std::exception& error) {
    // Some of these kernels are in Python, which raises an interrupt there: it would be lost, and Stop with it.
    if (std::string_view(error.what()).starts_with("KeyboardInterrupt"))
      throw;
    return std::nullopt;
  }
  for (const auto& [tensor, shape] : shapes)
    if (tensor.sizes() != shape.sizes())
      return std::nullopt;
  auto queued = std::make_unique<Queued>(Queued{call.op, {}, {}, {}});
  queued->stack = call.arguments_on(at::kCPU, [&](const Tensor& tensor) {
    if (tensor.defined() && tensor.is_cuda())
      queued->used.push_back(tensor.storage());
    return tensor.defined() && tensor.is_cpu() ? tensor.clone() : on_cpu(tensor);  // the host may change its own
  });
  for (size_t i = 0; i < results.size(); i++) {
    if (!results[i].isTensor() && !results[i].isTensorList())
      return std::nullopt;
    const auto* written = call.written(i);
    results[i] = map_tensors(written ? *written : results[i], [&](const Tensor& tensor) {
      if (written || !tensor.defined())
        return queued->targets.emplace_back(), tensor;
      auto result = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(call.device));
      queued->used.push_back(result.storage());
      queued->targets.push_back(on_cpu(result));
      return result;
    });
  }
  fake_push(stream, advance_kernel, queued.release());
  return results;
}

void compute(const c10::OperatorHandle& op, Stack* stack) {
  std::vector<std::unique_ptr<Queued>> freed;
  {
    const std::lock_guard<std::mutex> lock(finished_lock);
    freed.swap(finished);
  }
  const auto first = stack->end() - static_cast<std::ptrdiff_t>(op.schema().arguments().size());
  std::vector<IValue> given(first, stack->end());
  const auto device = device_of(op.schema().name(), given);
  const Call call{op, std::move(given), device};
  const c10::DeviceGuard guard(device);
  const c10::impl::VirtualGuardImpl gpu(at::kCUDA);
  const auto stream = gpu.getStream(device);
  fake_launch();
  std::optional<Stack> results;
  if (!gpu.queryStream(stream))
    results = queue(call, gpu.getStreamNativeHandle(stream));
  if (!results) {
    gpu.synchronizeStream(stream);
    results = compute_now(call);
  }
  stack->erase(first, stack->end());
  stack->insert(stack->end(), results->begin(), results->end());
}

// Between tensors of GPUs the CPU computes; between one and the host CUDA copies, after conversions on the GPU.
void copy(const c10::OperatorHandle& op, Stack* stack) {
  const auto arguments = stack->end() - 3;
  const auto target = arguments[0].toTensor(), source = arguments[1].toTensor();
  if (target.is_cuda() && source.is_cuda() && target.layout() == at::kStrided && source.layout() == at::kStrided) {
    const c10::impl::VirtualGuardImpl gpu(at::kCUDA);
    if (source.device() != target.device())
      gpu.synchronizeStream(gpu.getStream(source.device()));
    compute(op, stack);
    return;
  }
  auto written = target;
  at::native::copy_(written, source, arguments[2].toBool());
  stack->erase(arguments, stack->end());
  stack->emplace_back(target);
}

// No CPU has it, and each RMSNorm on a GPU wants it.
std::tuple<Tensor, Tensor> rms_norm_backward(
    const Tensor& grad, const Tensor& input, at::IntArrayRef shape, const Tensor& rstd,
    const std::optional<Tensor>& weight, std::array<bool, 2>) {
  std::vector<int64_t> normalized, batch;
  for (int64_t i = 0; i < input.dim(); i++)
    (i < input.dim() - static_cast<int64_t>(shape.size()) ? batch : normalized).push_back(i);
  const auto unit = input.to(rstd.scalar_type()) * rstd, scaled = weight ? grad * *weight : grad;
  const auto grad_input = (scaled - unit * (scaled * unit).mean(normalized, /*keepdim=*/true)) * rstd;
  const auto grad_weight = batch.empty() ? grad * unit : (grad * unit).sum(batch);
  return {grad_input.to(input.scalar_type()), weight ? grad_weight.to(weight->scalar_type()) : Tensor()};
}

void missing(const c10::OperatorHandle& op, Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.schema().name(), ": the fake GPU has it not, as no CPU has");
}

// Is this CUDA's own: an allocation, a view, or nothing that computes?
bool is_native(const c10::FunctionSchema& schema) {
  static const std::set<std::string> names{
      "aten::_assert_async", "aten::_fused_sdp_choice", "aten::_local_scalar_dense", "aten::_pin_memory",
      "aten::is_pinned",     "aten::record_stream",     "aten::resize_",             "aten::set_"};
  if (names.count(schema.name()) || schema.name().rfind("aten::empty", 0) == 0 ||
      schema.name().rfind("aten::_use_", 0) == 0)
    return true;
  for (const auto& returned : schema.returns())
    if (returned.alias_info() && !returned.alias_info()->isWrite())
      return true;
  return false;
}

void register_all() {
  struct Silent : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } silent;  // torch warns of overridden kernels
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  auto& dispatcher = c10::Dispatcher::singleton();
  static std::vector<c10::RegistrationHandleRAII> registered;
  const auto replace = [&](const c10::OperatorName& name, c10::KernelFunction kernel) {
    registered.push_back(dispatcher.registerImpl(
        name, c10::DispatchKey::CUDA, std::move(kernel), std::nullopt, nullptr, "the fake GPU"));
  };
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (!op || name.name.rfind("aten::", 0) != 0)
      continue;
    // Some call others on a GPU, which would be cuDNN's.
    const bool composite = name.name == "aten::convolution" || name.name == "aten::convolution_backward";
    const bool is_gpus = op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) && !is_native(op->schema());
    if (name.name == "aten::copy_")
      replace(name, c10::KernelFunction::makeFromBoxedFunction<&copy>());
    else if (name.name == "aten::_fused_rms_norm_backward")
      replace(name, c10::KernelFunction::makeFromUnboxedRuntimeFunction(&rms_norm_backward));
    else if (composite || (is_gpus && op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)))
      replace(name, c10::KernelFunction::makeFromBoxedFunction<&compute>());
    else if (is_gpus)
      replace(name, c10::KernelFunction::makeFromBoxedFunction<&missing>());
  }
}

const bool done = (register_all(), true);

}  // namespace
