// `lmlaunch chat`: a line of standard input is a turn. A terminal gets a prompt; through a pipe only the
// answers are written, one per line.
#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>

#include "base/error.h"
#include "base/log.h"
#include "launcher/worker/chat_prompt.h"
#include "launcher/worker/worker_commands.h"

namespace lm {
namespace {

constexpr int64_t kDefaultTokens = 1024, kDefaultContext = 4096;

// Ctrl-C ends an answer, or the chat if none is being generated. The event wakes the wait for a line,
// whichever thread has the signal and however shortly before the wait it comes.
volatile std::sig_atomic_t interrupted = 0;
int interrupt_event = -1;

void on_interrupt(int) {
  const int kept = errno;
  interrupted = 1;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = ::write(interrupt_event, &one, sizeof one);
  errno = kept;
}

void catch_interrupts() {
  interrupt_event = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  LM_CHECK(interrupt_event >= 0, std::strerror(errno));
  struct sigaction action {};
  action.sa_handler = on_interrupt;
  sigaction(SIGINT, &action, nullptr);
}

void forget_interrupts() {
  uint64_t count = 0;
  while (::read(interrupt_event, &count, sizeof count) > 0) {
  }
  interrupted = 0;
}

// Reads lines of standard input. Not a stream, because Ctrl-C must end the wait.
class Input {
 public:
  // False at the end of the input, or after Ctrl-C.
  bool line(std::string& out) {
    size_t end = 0;
    while ((end = read_.find('\n')) == std::string::npos) {
      pollfd waited[] = {{STDIN_FILENO, POLLIN, 0}, {interrupt_event, POLLIN, 0}};
      if (::poll(waited, 2, -1) < 0 && errno == EINTR) continue;
      if (waited[1].revents != 0) return false;
      char buffer[4096];
      const ssize_t n = ::read(STDIN_FILENO, buffer, sizeof buffer);
      if (n < 0 && errno == EINTR) continue;
      if (n > 0) {
        read_.append(buffer, static_cast<size_t>(n));
        continue;
      }
      if (n < 0 || read_.empty()) return false;
      end = read_.size();  // a last line without a newline
      read_ += '\n';
      break;
    }
    out = read_.substr(0, end);
    read_.erase(0, end + 1);
    if (!out.empty() && out.back() == '\r') out.pop_back();
    return true;
  }

 private:
  std::string read_;
};

class Chat {
 public:
  Chat(const CommandLine& line, ChatPrompt& chat_prompt, int64_t context)
      : chat_prompt_(chat_prompt),
        system_(line.value("--system").value_or("")),
        context_(context),
        most_(line.integer("--max-tokens").value_or(kDefaultTokens)),
        sampling_(sampling_of(line)) {
    reset();
  }

  void reset() {
    messages_.clear();
    if (!system_.empty()) messages_.push_back({"system", system_});
  }

  // If a turn does not fit, nothing of it is kept.
  void turn(const std::string& said) {
    messages_.push_back({"user", said});
    const std::vector<int32_t> prompt = chat_prompt_.text().conversation(messages_);
    if (std::ssize(prompt) >= context_) {
      messages_.pop_back();
      log_line(
          fmt::format("this conversation has {} tokens, and there is room for {}: /reset begins a new one, "
                      "--context N makes more room",
                      prompt.size(), context_));
      return;
    }
    AnswerOptions options{.most = most_, .sampling = sampling_};
    options.sampling.seed = sampling_.seed + messages_.size();  // a seed of its own for each turn
    options.stopped = [&] { return interrupted != 0; };
    const auto answer = chat_prompt_.answer(prompt, options, [](const std::string& piece) {
      std::fputs(piece.c_str(), stdout);
      std::fflush(stdout);
    });
    std::printf("\n");
    std::fflush(stdout);
    messages_.push_back({"assistant", answer.text});
    if (answer.full)
      log_line(fmt::format(
          "the answer ends here: all {} tokens of --context are used; /reset begins a new conversation",
          context_));
  }

 private:
  ChatPrompt& chat_prompt_;
  std::string system_;
  int64_t context_, most_;
  Sampling sampling_;
  std::vector<ChatMessage> messages_;
};

constexpr const char* kHelp =
    "a line is a turn; /reset begins a new conversation, /exit (or Ctrl-D) ends, Ctrl-C stops an answer";

// Executes a command that begins with a slash; false: end the chat.
bool obey(const std::string& word, Chat& chat) {
  if (word == "/exit") return false;
  if (word == "/reset") {
    chat.reset();
    log_line("new conversation");
  } else if (word == "/help") {
    log_line(kHelp);
  } else {
    log_line("unknown command " + word + "; " + kHelp);
  }
  return true;
}

}  // namespace

Exit chat_command(const CommandLine& line) {
  sampling_of(line);  // report mistakes before anything is loaded
  ChatPrompt chat_prompt(line);
  if (!chat_prompt.text().has_template())
    log_note("DATA-23",
             "the model has no chat template: turns are written as \"### Instruction\" and "
             "\"### Response\", as in training");
  if (chat_prompt.text().has_template() && chat_prompt.render() == Render::kPlain)
    log_note(
        "DATA-23",
        "this run was trained without the chat template (data.render = \"plain\"), and chat writes turns "
        "by it; `lmlaunch generate` prompts as the run was trained");
  const int64_t most = chat_prompt.spec().max_positions;
  const int64_t context =
      line.integer("--context").value_or(most > 0 ? std::min(most, kDefaultContext) : kDefaultContext);
  chat_prompt.load(context);
  Chat chat(line, chat_prompt, std::max<int64_t>(context, 2));
  const bool terminal = isatty(STDIN_FILENO) != 0 && isatty(STDOUT_FILENO) != 0;
  if (terminal) log_line(kHelp);
  catch_interrupts();
  Input input;
  for (std::string said;;) {
    forget_interrupts();  // one that stopped an answer does not end the chat
    if (terminal) std::printf("> ");
    std::fflush(stdout);
    if (!input.line(said)) {
      if (terminal) std::printf("\n");
      return Exit::kDone;
    }
    if (said.find_first_not_of(" \t") == std::string::npos) continue;
    if (said[0] == '/' ? !obey(said, chat) : (chat.turn(said), false)) return Exit::kDone;
  }
}

}  // namespace lm
