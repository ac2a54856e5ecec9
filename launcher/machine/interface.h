// By which of this machine's network interfaces another machine is reached. Any thread may call; nothing is
// sent.
#pragma once

#include <string>

namespace lm {

// The interface of the route to a numeric address, or the one that has it where it is this machine's own:
// "eth0".
// "" where there is no route, and of loopback, by which no other machine is reached.
std::string interface_towards(const std::string& address);

}  // namespace lm
