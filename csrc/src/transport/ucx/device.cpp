#include "megatronapp/transport/ucx/device.hpp"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netinet/in.h>

#include <array>
#include <cstring>
#include <memory>

#include "megatronapp/transport/errors.hpp"

namespace megatronapp::transport::ucx {
namespace {

struct Address {
    int family;
    std::array<std::byte, sizeof(in6_addr)> bytes;

    bool operator==(const Address&) const = default;
};

/// Raises TransportError for text that is no address.
Address parse(const std::string& text) {
    Address address{};
    for (const int family : {AF_INET, AF_INET6}) {
        if (::inet_pton(family, text.c_str(), address.bytes.data()) == 1) {
            address.family = family;
            return address;
        }
    }
    throw TransportError(text + " is no IPv4 or IPv6 address");
}

Address address_of(const sockaddr* socket_address) {
    Address address{};
    address.family = socket_address->sa_family;
    if (address.family == AF_INET) {
        const auto* in = reinterpret_cast<const sockaddr_in*>(socket_address);
        std::memcpy(address.bytes.data(), &in->sin_addr, sizeof(in->sin_addr));
    } else if (address.family == AF_INET6) {
        const auto* in = reinterpret_cast<const sockaddr_in6*>(socket_address);
        std::memcpy(address.bytes.data(), &in->sin6_addr, sizeof(in->sin6_addr));
    }
    return address;
}

}  // namespace

std::string interface_of(const std::string& address) {
    const Address wanted = parse(address);
    ifaddrs* first = nullptr;
    if (::getifaddrs(&first) != 0) {
        throw TransportError("the network interfaces of this machine cannot be listed");
    }
    const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(first, &::freeifaddrs);
    for (const ifaddrs* entry = first; entry != nullptr; entry = entry->ifa_next) {
        if (entry->ifa_addr != nullptr && address_of(entry->ifa_addr) == wanted) {
            return entry->ifa_name;
        }
    }
    throw TransportError("no network interface of this machine has the address " + address +
                         "; give each rank the address of its own node (--node-ips)");
}

}  // namespace megatronapp::transport::ucx
