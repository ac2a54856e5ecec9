#include "tests/support/cli.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>

namespace lm {
namespace {

namespace fs = std::filesystem;

}  // namespace

std::string CliResult::last_line() const {
  std::string line, last;
  std::istringstream lines(err);
  while (std::getline(lines, line)) last = line;
  return last;
}

Cli::Cli() {
  std::string name = (fs::temp_directory_path() / "lmlaunch-cli-XXXXXX").string();
  if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp");
  directory_ = name;
  fs::copy_file(LM_BINARIES "/lmlaunch", path("lmlaunch"));  // copies: /proc/self/exe tells where it lies
  fs::copy_file(LM_BINARIES "/fake_worker", path("lmlaunch-cpu"));
  fs::create_directory(path("model"));
  write("model/config.json", "{}");
}

Cli::~Cli() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  std::error_code ignored;
  fs::remove_all(directory_, ignored);
}

void Cli::add_cuda_program() const {
  fs::copy_file(LM_BINARIES "/fake_worker", path("lmlaunch-cuda"));
}

void Cli::write(const std::string& name, const std::string& text) const {
  std::ofstream(path(name)) << text;
}

std::string Cli::read(const std::string& name) const {
  std::ifstream file(path(name));
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

bool Cli::exists(const std::string& name) const {
  return fs::exists(path(name));
}

void Cli::write_config(const std::string& name, const std::string& more) const {
  write(name, "model.path = \"model\"\ndata.train = [\"t.jsonl\"]\nrun.dir = \"run\"\n" + more);
}

CliResult Cli::run(const std::vector<std::string>& arguments, const std::string& script,
                   const std::vector<std::string>& environment) {
  start(arguments, script, environment);
  return finish();
}

void Cli::start(const std::vector<std::string>& arguments, const std::string& script,
                const std::vector<std::string>& environment) {
  std::vector<std::string> texts = {path("lmlaunch")},
                           variables = {"FAKE_WORKER=" + script, "HOME=" + path("home")};
  texts.insert(texts.end(), arguments.begin(), arguments.end());
  variables.insert(variables.end(), environment.begin(), environment.end());
  std::vector<char*> argv, envp;
  for (std::string& text : texts) argv.push_back(text.data());
  for (std::string& text : variables) envp.push_back(text.data());
  argv.push_back(nullptr);
  envp.push_back(nullptr);
  int out[2], err[2];
  if (pipe2(out, O_CLOEXEC) != 0 || pipe2(err, O_CLOEXEC) != 0) throw std::runtime_error("pipe");
  result_ = {};
  pid_ = fork();
  if (pid_ == 0) {
    setpgid(0, 0);
    if (chdir(directory_.c_str()) != 0) _exit(126);
    dup2(out[1], 1);
    dup2(err[1], 2);
    execve(argv[0], argv.data(), envp.data());
    _exit(127);
  }
  close(out[1]);
  close(err[1]);
  out_ = out[0];
  err_ = err[0];
}

void Cli::drain(int timeout_ms) {
  pollfd ends[2] = {{out_, POLLIN, 0}, {err_, POLLIN, 0}};
  if (poll(ends, 2, timeout_ms) <= 0) return;
  for (int i = 0; i < 2; ++i) {
    if (ends[i].revents == 0) continue;
    char buffer[4096];
    const ssize_t n = ::read(ends[i].fd, buffer, sizeof buffer);
    if (n > 0) {
      (i == 0 ? result_.out : result_.err).append(buffer, static_cast<size_t>(n));
    } else if (n == 0) {
      close(ends[i].fd);
      (i == 0 ? out_ : err_) = -1;
    }
  }
}

void Cli::wait_for(const std::string& text) {
  for (int looks = 0; result_.err.find(text) == std::string::npos; ++looks) {
    if (looks == 600) throw std::runtime_error("no <" + text + "> in: " + result_.err);
    drain(100);
  }
}

void Cli::send(int signal) const {
  kill(pid_, signal);
}

pid_t Cli::child() const {
  std::ifstream file("/proc/" + std::to_string(pid_) + "/task/" + std::to_string(pid_) + "/children");
  pid_t child = 0;
  file >> child;
  return child;
}

CliResult Cli::finish() {
  while (out_ >= 0 || err_ >= 0) drain(1000);
  int status = 0;
  waitpid(pid_, &status, 0);
  pid_ = 0;
  result_.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  result_.signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
  return result_;
}

}  // namespace lm
