// What each bind_*.cpp adds to the Python module.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "primitive.h"

namespace ttd {

void bind_expert_ffn(nanobind::module_& m);
void bind_linear(nanobind::module_& m);

}  // namespace ttd
