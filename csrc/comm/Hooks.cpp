#include "comm/Hooks.hpp"

#include "comm/HookCall.hpp"

namespace torchcomms_pg {

uint64_t Hooks::nextOpId() {
  static std::atomic<uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

void Hooks::replace(std::shared_ptr<const Table> table) {
  any_.store(
      !table->pre.empty() || !table->post.empty() || !table->end.empty(),
      std::memory_order_relaxed);
  table_ = std::move(table);
}

void Hooks::remove(Id id) {
  std::shared_ptr<const Table> old;  // freed after the lock is released, see insert()
  LockGuard lock(mutex_);
  auto table = std::make_shared<Table>(*table_);
  const auto drop = [id](auto& list) {
    std::erase_if(list, [id](const auto& entry) { return entry.first == id; });
  };
  drop(table->pre);
  drop(table->post);
  drop(table->end);
  drop(table->abort);
  old = std::move(table_);
  replace(std::move(table));
}

void Hooks::clear() {
  std::shared_ptr<const Table> old;
  LockGuard lock(mutex_);
  old = std::move(table_);
  replace(std::make_shared<Table>());
}

std::shared_ptr<const Hooks::Table> Hooks::table() const {
  LockGuard lock(mutex_);
  return table_;
}

void Hooks::fireEnd(std::shared_ptr<EndHookArgs> args) {
  auto table = this->table();
  if (table->end.empty()) {
    return;
  }
  const bool async = args->async;
  auto fire = [table = std::move(table), args = std::move(args)] {
    for (const auto& [id, hook] : table->end) {
      callHook("an end hook", [&] { (*hook)(args); });
    }
  };
  if (async) {
    thread_.enqueue(std::move(fire));
  } else {
    fire();
  }
}

void Hooks::firePost(List<Post> hooks, std::shared_ptr<PostHookArgs> args) {
  thread_.enqueue([hooks = std::move(hooks), args = std::move(args)] {
    for (const auto& [id, hook] : hooks) {
      callHook("a post hook", [&] { (*hook)(args); });
    }
  });
}

}  // namespace torchcomms_pg
