#include "primitive.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"

namespace mx = mlx::core;

namespace ttd {
namespace {

// Copies runs of `run` bytes, which lie together, out of the first `axes` axes to where `to` moves on from.
void gather(const char* from, char*& to, const mx::array& a, size_t axis, size_t axes, size_t run) {
  if (axis == axes) {
    std::memcpy(to, from, run);
    to += run;
    return;
  }
  const int64_t stride = a.strides()[axis] * static_cast<int64_t>(a.itemsize());
  for (int i = 0; i < a.shape(static_cast<int>(axis)); ++i) gather(from + i * stride, to, a, axis + 1, axes, run);
}

void copy_rows(const mx::array& from, char* to) {
  size_t axes = from.ndim(), run = from.itemsize();
  const auto together = [&](size_t axis) {
    return from.shape()[axis] == 1 || from.strides()[axis] * static_cast<int64_t>(from.itemsize()) == static_cast<int64_t>(run);
  };
  for (; axes > 0 && together(axes - 1); --axes) run *= static_cast<size_t>(from.shape()[axes - 1]);
  gather(from.data<char>(), to, from, 0, axes, run);
}

mx::array contiguous(const mx::array& a, mx::cpu::CommandEncoder& encoder) {
  if (a.flags().row_contiguous || a.size() == 0 || a.ndim() == 0) return a;
  mx::array copy(a.shape(), a.dtype(), nullptr, {});
  copy.set_data(mx::allocator::malloc(copy.nbytes()));
  encoder.add_temporary(copy);
  encoder.dispatch([from = mx::array::unsafe_weak_copy(a), to = mx::array::unsafe_weak_copy(copy)]() mutable {
    copy_rows(from, to.data<char>());
  });
  return copy;
}

// Arrays that a Native call fills besides its output, until a Beside takes each over.
using Side = std::shared_ptr<Arrays>;

class Native : public mx::Primitive {
 public:
  Native(mx::Stream stream, const char* name, std::vector<int> donors, Side side, Body body)
      : mx::Primitive(stream), name_(name), donors_(std::move(donors)), side_(std::move(side)), body_(std::move(body)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    Arrays from, to;
    for (const auto& input : inputs) {
      from.push_back(mx::array::unsafe_weak_copy(contiguous(input, encoder)));
      encoder.set_input_array(from.back());
    }
    const auto give = [&](mx::array& output, int donor) {
      if (donor >= 0 && inputs[donor].is_donatable() && inputs[donor].flags().row_contiguous &&
          inputs[donor].data_size() == inputs[donor].size())
        output.copy_shared_buffer(inputs[donor]);
      else
        output.set_data(mx::allocator::malloc(output.nbytes()));
      encoder.set_output_array(output);
    };
    for (size_t i = 0; i < outputs.size(); ++i) {
      give(outputs[i], donors_[i]);
      to.push_back(mx::array::unsafe_weak_copy(outputs[i]));
    }
    // Held until the body has run, whatever becomes of the Beside.
    for (size_t i = 0; side_ && i < side_->size(); ++i) {
      give((*side_)[i], -1);
      to.push_back((*side_)[i]);
    }
    encoder.dispatch([body = body_, from = std::move(from), to = std::move(to)]() mutable { body(from, to); });
  }

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error(std::string("[mlx_ttd] ") + name_ +
                             " is a CPU operation; move its inputs to a CPU stream or use the GPU kernel.");
  }

  const char* name() const override { return name_; }

 private:
  const char* name_;
  std::vector<int> donors_;
  Side side_;
  Body body_;
};

// An output of the Native call that its one input came from.
class Beside : public mx::Primitive {
 public:
  Beside(mx::Stream stream, const char* name, Side side, size_t index)
      : mx::Primitive(stream), name_(name), side_(std::move(side)), index_(index) {}

  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>& outputs) override {
    mx::array& made = (*side_)[index_];
    outputs[0].copy_shared_buffer(made);
    made = mx::array::unsafe_weak_copy(made);
  }

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error(std::string("[mlx_ttd] ") + name_ + " is a CPU operation.");
  }

  const char* name() const override { return name_; }

 private:
  const char* name_;
  Side side_;
  size_t index_;
};

}  // namespace

Arrays call(const char* name, Arrays inputs, std::vector<Output> outputs, Body body) {
  const auto stream = mx::default_stream(mx::Device::cpu);
  std::vector<mx::Shape> shapes;
  std::vector<mx::Dtype> dtypes;
  std::vector<int> donors;
  // MLX lets an input's memory go only when one array holds the input, and the outputs of one primitive all hold it. So
  // a donor's heir is the only output of its primitive, and the others are made beside it. A graph that mx.compile
  // traces runs its primitives many times, so there nothing may be kept beside.
  const bool traced = std::any_of(inputs.begin(), inputs.end(), [](const mx::array& a) { return a.is_tracer(); });
  const bool apart = outputs.size() > 1 && outputs[0].donor >= 0 && !traced;
  const size_t own = apart ? 1 : outputs.size();
  for (size_t i = 0; i < own; ++i) {
    shapes.push_back(outputs[i].shape);
    dtypes.push_back(outputs[i].dtype);
    donors.push_back(outputs[i].donor);
  }
  Side side;
  if (apart) {
    side = std::make_shared<Arrays>();
    for (size_t i = 1; i < outputs.size(); ++i) side->emplace_back(outputs[i].shape, outputs[i].dtype, nullptr, Arrays{});
  }
  auto made = mx::array::make_arrays(
      std::move(shapes), std::move(dtypes),
      std::make_shared<Native>(stream, name, std::move(donors), side, std::move(body)), std::move(inputs));
  for (size_t i = 1; apart && i < outputs.size(); ++i)
    made.emplace_back(outputs[i].shape, outputs[i].dtype, std::make_shared<Beside>(stream, name, side, i - 1), Arrays{made[0]});
  return made;
}

Type type_of(const mx::array& a) {
  if (a.dtype() == mx::float32) return Type::f32;
  if (a.dtype() == mx::bfloat16) return Type::bf16;
  if (a.dtype() == mx::float16) return Type::f16;
  throw std::invalid_argument("Native operations take float32, bfloat16 or float16 arrays; cast the array first.");
}

void require(bool condition, const std::string& what) {
  if (!condition) throw std::invalid_argument(what);
}

}  // namespace ttd
