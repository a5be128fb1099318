#include "router.h"

#include "operations.h"

namespace ttd {

void router(const Router& call) { operations().router(call); }

}  // namespace ttd
