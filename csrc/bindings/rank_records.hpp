#pragma once

#include <pybind11/pybind11.h>

namespace megatronapp {

/// Adds the merging of records to the module.
void bind_rank_records(pybind11::module_& module);

}  // namespace megatronapp
