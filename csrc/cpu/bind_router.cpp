#include "bindings.h"
#include "router.h"

namespace nb = nanobind;
namespace mx = mlx::core;

namespace ttd {
namespace {

std::pair<mx::array, mx::array> bind(const mx::array& x, const Stored& weight, int choices) {
  require_rows(x, weight);
  Router call{};
  call.gate = weight.matrix;
  require(choices >= 1 && choices <= call.gate.rows, "There must be at least one choice, and no more than experts.");
  call.tokens = x.shape(0);
  call.choices = choices;
  call.x_type = type_of(x);
  const mx::Shape shape{x.shape(0), choices};
  Arrays inputs{x};
  add_weight(inputs, weight);
  auto out = ttd::call("router", std::move(inputs), {{shape, mx::int32}, {shape, mx::float32}},
                       [call](const Arrays& in, Arrays& out) mutable {
                         call.x = in[0].data<void>();
                         point_at(call.gate, in, 1);
                         call.ids = out[0].data<int32_t>();
                         call.weights = out[1].data<float>();
                         router(call);
                       });
  return {out[0], out[1]};
}

}  // namespace

void bind_router(nb::module_& m) {
  m.def("router", bind, nb::arg("x"), nb::arg("weight"), nb::arg("k"),
        "The k most probable rows of a stored weight for each x: ids int32 [T, k] ascending, weights f32 [T, k].");
}

}  // namespace ttd
