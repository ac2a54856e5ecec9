// What Prometheus scrapes: the text by promtool's rules, and requests that are none.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmath>
#include <regex>
#include <set>
#include <sstream>

#include "base/error.h"
#include "config/listen_address.h"
#include "launcher/worker/prometheus_text.h"
#include "launcher/worker/scrape_server.h"

namespace lm {
namespace {

#define EXPECT_HAS(text, part) \
  EXPECT_NE((text).find(part), std::string::npos) << "no <" << (part) << "> in\n" << (text)

RunMetrics full() {
  RunMetrics out;
  out.run = "a \"b\"\\c\nd";
  out.version = "0.1.0";
  out.step = 12, out.total_steps = 100;
  out.loss = 2.5, out.grad_norm = std::nan(""), out.lr = 1e-5, out.tokens_per_s = 1000.5;
  out.last_step_time = 1790000000.5;
  out.tokens = 4096;
  out.eval_loss = {{"code", 1.5}, {"math", INFINITY}};
  out.memory = {{"device", 20}, {"host", 30}};
  out.planned_memory = {{"host", 31}};
  out.link_bytes = {{"disk_read", 7}};
  out.gpus = {{.uuid = "GPU-1", .name = "H200", .utilization = 0.87, .watts = 312.5, .celsius = {}}};
  return out;
}

// Each family begins with HELP and TYPE and stands in one piece; names, labels and numbers are well formed; a
// counter's name, and no other, ends with _total.
void expect_well_formed(const std::string& text) {
  static const std::regex help("# HELP (lmlaunch_[a-z_]+) [A-Z].*\\."), type("# TYPE (\\S+) (gauge|counter)");
  static const std::regex sample(
      R"re((lmlaunch_[a-z_]+)(\{[a-z_]+="([^"\\]|\\["\\n])*"(,[a-z_]+="([^"\\]|\\["\\n])*")*\})? (NaN|[+-]Inf|-?[0-9.]+(e[+-][0-9]+)?))re");
  std::istringstream lines(text);
  std::string family;
  std::set<std::string> families;
  for (std::string line; std::getline(lines, line);) {
    std::smatch match;
    if (std::regex_match(line, match, help)) {
      family = match[1];
      EXPECT_TRUE(families.insert(family).second) << line;
      EXPECT_TRUE(std::getline(lines, line) && std::regex_match(line, match, type)) << line;
      EXPECT_EQ(match[1], family);
      EXPECT_EQ(match[2] == "counter", family.ends_with("_total")) << line;
    } else {
      ASSERT_TRUE(std::regex_match(line, match, sample)) << line;
      EXPECT_EQ(match[1], family) << line;
    }
  }
  EXPECT_TRUE(text.ends_with("\n"));
}

TEST(Prometheus, TheTextIsWellFormed) {
  expect_well_formed(prometheus_text(full()));
  expect_well_formed(prometheus_text({}));
  const std::string text = prometheus_text(full());
  for (const char* part :
       {"\nlmlaunch_step 12\n", "\nlmlaunch_loss 2.5\n", "\nlmlaunch_gradient_norm NaN\n",
        "\nlmlaunch_eval_loss{set=\"math\"} +Inf\n", "\nlmlaunch_memory_bytes{tier=\"host\"} 30\n",
        "{run=\"a \\\"b\\\"\\\\c\\nd\",version=\"0.1.0\"} 1\n",
        "\nlmlaunch_link_bytes_total{link=\"disk_read\"} 7\n",
        "\nlmlaunch_gpu_power_watts{uuid=\"GPU-1\",name=\"H200\"} 312.5\n",
        "\nlmlaunch_learning_rate 1e-05\n"})
    EXPECT_HAS(text, part);
  EXPECT_EQ(text.find("celsius"), std::string::npos);  // the driver does not report it
}

TEST(Prometheus, BeforeTheFirstStepThereIsNoLoss) {
  EXPECT_EQ(prometheus_text({}).find("lmlaunch_loss"), std::string::npos);
}

TEST(Prometheus, AnAddressIsNumeric) {
  EXPECT_EQ(listen_address("127.0.0.1:9400")->port, 9400);
  EXPECT_EQ(listen_address("[::1]:0")->host, "::1");
  for (const char* wrong : {"localhost:9400", ":9400", "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:-1",
                            "127.0.0.1:9x", "::1:9400", "[127.0.0.1]:9400", "9400"})
    EXPECT_FALSE(listen_address(wrong)) << wrong;
  EXPECT_TRUE(means_address("localhost:9400"));
  EXPECT_FALSE(means_address("/var/lib/a:b.prom"));
  EXPECT_FALSE(means_address("lmlaunch.prom"));
}

// What a server answers to a request.
std::string asked(const std::string& request) {
  const ScrapeServer server("127.0.0.1:0", [] { return std::string("text\n"); });
  EXPECT_EQ(server.url(), "http://127.0.0.1:" + std::to_string(server.port()) + "/metrics");
  sockaddr_in to{};
  to.sin_family = AF_INET, to.sin_port = htons(static_cast<uint16_t>(server.port()));
  inet_pton(AF_INET, "127.0.0.1", &to.sin_addr);
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof to), 0);
  EXPECT_EQ(send(fd, request.data(), request.size(), MSG_NOSIGNAL), static_cast<ssize_t>(request.size()));
  std::string out;
  char bytes[4096];
  for (ssize_t n = 0; (n = recv(fd, bytes, sizeof bytes, 0)) > 0;) out.append(bytes, static_cast<size_t>(n));
  close(fd);
  return out;
}
std::string asked_for(const std::string& line, const std::string& more = "") {
  return asked(line + "\r\nHost: x\r\nConnection: close\r\n" + more + "\r\n");
}

TEST(Prometheus, IsServedByHttp) {
  const std::string got = asked_for("GET /metrics HTTP/1.1");
  EXPECT_TRUE(got.starts_with("HTTP/1.1 200 OK\r\n")) << got;
  EXPECT_HAS(got, "text/plain; version=0.0.4");
  EXPECT_HAS(got, "Content-Length: 5\r\n");
  EXPECT_TRUE(got.ends_with("\r\n\r\ntext\n")) << got;
  EXPECT_HAS(asked_for("GET /metrics?x=1 HTTP/1.1"), "HTTP/1.1 200 OK\r\n");
}

TEST(Prometheus, OnlyAGetOfTheMetricsIsAnswered) {
  EXPECT_HAS(asked_for("GET /etc/passwd HTTP/1.1"), "HTTP/1.1 404 ");
  EXPECT_HAS(asked_for("POST /metrics HTTP/1.1", "Content-Length: 0\r\n"), "HTTP/1.1 405 ");
  EXPECT_HAS(asked_for("POST /metrics HTTP/1.1", "Content-Length: 3\r\n"), "HTTP/1.1 413 ");
  EXPECT_HAS(asked_for("GET /metrics x HTTP/1.1"), "HTTP/1.1 400 ");
  // A head without end is not collected for ever.
  EXPECT_HAS(asked("GET / HTTP/1.1\r\nA: " + std::string(9000, 'x')), "HTTP/1.1 431 ");
}

TEST(Prometheus, APortInUseIsNamedBeforeTraining) {
  const auto text = [] { return std::string(); };
  const ScrapeServer server("127.0.0.1:0", text);
  try {
    const ScrapeServer second("127.0.0.1:" + std::to_string(server.port()), text);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::kDoesNotFit);
    EXPECT_HAS(error.report(), "Address already in use");
  }
}

}  // namespace
}  // namespace lm
