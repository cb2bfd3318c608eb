#pragma once

#include <string>

namespace megatronapp::transport::ucx {

/// The network interface of this machine that has an IPv4 or IPv6 address. Raises TransportError if none has.
[[nodiscard]] std::string interface_of(const std::string& address);

}  // namespace megatronapp::transport::ucx
