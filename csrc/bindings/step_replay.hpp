#pragma once

#include <pybind11/pybind11.h>

namespace megatronapp {

/// Adds the replay of steps to the module.
void bind_step_replay(pybind11::module_& module);

}  // namespace megatronapp
