// The network interface by which another machine is reached. Any thread may call; sends nothing.
#pragma once

#include <string>

namespace lm {

// The interface, such as "eth0", of the route to a numeric address, or the one that has this address if it is
// this machine's own. "" if there is no route, or only loopback, which reaches no other machine.
std::string interface_towards(const std::string& address);

}  // namespace lm
