#include "bindings.h"
#include "top.h"

namespace nb = nanobind;
namespace mx = mlx::core;

namespace ttd {
namespace {

mx::array bind(const mx::array& numbers, int count) {
  require(numbers.ndim() == 1 && numbers.dtype() == mx::float32, "numbers must be float32 [n].");
  require(1 <= count && count <= numbers.shape(0), "count must be from 1 to as many numbers as there are.");
  Top call{};
  call.size = numbers.shape(0);
  call.count = count;
  return ttd::call("top", {numbers}, {{{count}, mx::int32}}, [call](const Arrays& in, Arrays& out) mutable {
    call.numbers = in[0].data<float>();
    call.ids = out[0].data<int32_t>();
    top(call);
  })[0];
}

}  // namespace

void bind_top(nb::module_& m) {
  m.def("top", bind, nb::arg("numbers"), nb::arg("count"), "int32 [count] indices of the greatest numbers, in order.");
}

}  // namespace ttd
