// One MLX primitive for all native operations: it holds a body that runs on contiguous inputs and allocated outputs.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "mlx/mlx.h"
#include "numbers.h"

namespace ttd {

using Arrays = std::vector<mlx::core::array>;
using Body = std::function<void(const Arrays& inputs, Arrays& outputs)>;

struct Output {
  mlx::core::Shape shape;
  mlx::core::Dtype dtype;
  int donor = -1;  // of the first output: the input whose memory it may take over, when no one else holds that
};

// A lazy call of `body`, which runs on the stream's thread; what it throws surfaces at mx.eval as RuntimeError.
Arrays call(const char* name, Arrays inputs, std::vector<Output> outputs, Body body);

Type type_of(const mlx::core::array& a);  // std::invalid_argument unless float32, bfloat16 or float16

// std::invalid_argument naming `what` unless the condition holds.
void require(bool condition, const std::string& what);

}  // namespace ttd
