// What a warm rank's server is asked: a process like the one that asks. Over a stream socket: a header with
// the three standard streams and all other open descriptors (SCM_RIGHTS), then texts.
#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace lm::warm {

constexpr size_t kMostDescriptors = 64;

struct Request {
  std::vector<std::string> arguments, environment;
  std::string directory;
  uint64_t ignored_signals = 0, blocked_signals = 0;  // bit n - 1: signal n
  uint32_t umask = 022;
  std::vector<int32_t> numbers;       // under which the asker has the descriptors
  std::vector<int> descriptors = {};  // of this process, in that order
};

// What is said at the child's end: as waitpid reports it.
struct Ended {
  int32_t status = 0;
};

inline bool move_all(int socket, void* bytes, size_t size, bool out) {
  auto* at = static_cast<char*>(bytes);
  while (size > 0) {
    const ssize_t n = out ? send(socket, at, size, MSG_NOSIGNAL) : recv(socket, at, size, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    at += n;
    size -= static_cast<size_t>(n);
  }
  return true;
}

inline void put(std::string& to, const void* bytes, size_t size) {
  to.append(static_cast<const char*>(bytes), size);
}
inline void put_texts(std::string& to, const std::vector<std::string>& texts) {
  const uint32_t count = static_cast<uint32_t>(texts.size());
  put(to, &count, sizeof count);
  for (const std::string& text : texts) to.append(text.c_str(), text.size() + 1);
}

struct Reader {
  const std::string& from;
  size_t at = 0;
  void take(void* to, size_t size) {
    std::memcpy(to, from.data() + at, size);
    at += size;
  }
  std::vector<std::string> texts() {
    uint32_t count = 0;
    take(&count, sizeof count);
    std::vector<std::string> out;
    for (uint32_t i = 0; i < count; ++i) {
      out.emplace_back(from.c_str() + at);
      at += out.back().size() + 1;
    }
    return out;
  }
};

inline bool send_request(int socket, const Request& r) {
  std::string text;
  put_texts(text, r.arguments);
  put_texts(text, r.environment);
  put_texts(text, {r.directory});
  put(text, &r.ignored_signals, sizeof r.ignored_signals);
  put(text, &r.blocked_signals, sizeof r.blocked_signals);
  put(text, &r.umask, sizeof r.umask);
  uint64_t header[2] = {text.size(), r.descriptors.size()};
  char control[CMSG_SPACE(sizeof(int) * kMostDescriptors)] = {};
  iovec part{header, sizeof header};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = CMSG_SPACE(sizeof(int) * r.descriptors.size());
  cmsghdr* const rights = CMSG_FIRSTHDR(&message);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(sizeof(int) * r.descriptors.size());
  std::memcpy(CMSG_DATA(rights), r.descriptors.data(), sizeof(int) * r.descriptors.size());
  if (sendmsg(socket, &message, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof header)) return false;
  std::vector<int32_t> numbers = r.numbers;
  return move_all(socket, numbers.data(), sizeof(int32_t) * numbers.size(), true) &&
         move_all(socket, text.data(), text.size(), true);
}

inline bool receive_request(int socket, Request& r) {
  uint64_t header[2] = {};
  char control[CMSG_SPACE(sizeof(int) * kMostDescriptors)] = {};
  iovec part{header, sizeof header};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  if (recvmsg(socket, &message, MSG_CMSG_CLOEXEC) != static_cast<ssize_t>(sizeof header)) return false;
  r.descriptors.resize(header[1]);
  r.numbers.resize(header[1]);
  const cmsghdr* const rights = CMSG_FIRSTHDR(&message);
  if (rights == nullptr || rights->cmsg_len != CMSG_LEN(sizeof(int) * header[1])) return false;
  std::memcpy(r.descriptors.data(), CMSG_DATA(rights), sizeof(int) * header[1]);
  std::string text(header[0], '\0');
  if (!move_all(socket, r.numbers.data(), sizeof(int32_t) * header[1], false) ||
      !move_all(socket, text.data(), text.size(), false))
    return false;
  Reader reader{text};
  r.arguments = reader.texts();
  r.environment = reader.texts();
  r.directory = reader.texts().front();
  reader.take(&r.ignored_signals, sizeof r.ignored_signals);
  reader.take(&r.blocked_signals, sizeof r.blocked_signals);
  reader.take(&r.umask, sizeof r.umask);
  return true;
}

}  // namespace lm::warm
