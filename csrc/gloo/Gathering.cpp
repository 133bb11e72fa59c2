// All-gather, broadcast, gather and scatter between hosts.
#include <algorithm>
#include <cstring>

#include "gloo/Execution.hpp"
#include "host/Reduce.hpp"

namespace torchcomms_pg::gloo {

void Execution::allGather(const Collective& c) {
  const size_t bytes = c.count * elementSize(c.type);
  const auto place = [&](int rank) { return at(c.output, rank * bytes); };
  std::vector<std::vector<char>> received(hosts_);
  std::vector<char> packed;
  Step step(*this);
  const auto receive = [&] {
    forOtherHosts([&](int host) {
      const auto theirs = onRail(host, local());
      if (theirs.size() == 1) {
        return step.receive(host, place(theirs.front()), bytes);
      }
      received[host].resize(theirs.size() * bytes);
      step.receive(host, received[host].data(), received[host].size());
    });
  };
  // If no other rank of this host uses this rank's rail, sends at once, before the host's ranks
  // gather.
  const auto here = onRail() ? onRail(host_, local()) : std::vector<int>();
  const bool alone = here.size() == 1;
  if (alone) {
    receive();
    forOtherHosts([&](int host) { step.send(host, c.input, bytes); });
  }
  if (t_.contiguous(host_)) {
    inside(
        {c.kind == Kind::split ? Kind::allGather : c.kind, c.input, place(t_.inside().front()),
         c.count, c.type});
  } else {
    const auto gathered = block(localSize() * bytes);
    inside({Kind::allGather, c.input, gathered.get(), c.count, c.type});
    for (int i = 0; i < localSize(); ++i) {
      host::copy(place(t_.inside()[i]), at(gathered.get(), i * bytes), bytes);
    }
  }
  if (onRail() && !alone) {
    receive();
    for (const int rank : here) {
      packed.insert(packed.end(), place(rank), place(rank) + bytes);
    }
    forOtherHosts([&](int host) { step.send(host, packed.data(), packed.size()); });
  }
  step.finish();
  for (int host = 0; onRail() && host < hosts_; ++host) {
    for (size_t i = 0; i * bytes < received[host].size() && bytes > 0; ++i) {
      std::memcpy(place(onRail(host, local())[i]), at(received[host].data(), i * bytes), bytes);
    }
  }
  forOtherHosts([&](int host) {
    const bool sameRails =
        t_.rails == localSize() && static_cast<int>(t_.hosts[host].size()) == t_.rails;
    if (sameRails && t_.contiguous(host)) {
      char* const first = place(t_.hosts[host].front());
      inside({Kind::allGather, at(first, local() * bytes), first, c.count, c.type});
      return;
    }
    for (const int rank : t_.hosts[host]) {
      inside({Kind::broadcast, place(rank), place(rank), c.count, c.type, t_.railOf(rank)});
    }
  });
}

void Execution::broadcast(const Collective& c) {
  const size_t bytes = c.count * elementSize(c.type);
  if (bytes <= kSmall) {
    return broadcastSmall(c);
  }
  // Each rail scatters its slice of a piece from the root's host to all hosts; then the hosts
  // exchange their parts. No host sends more than twice the data (van de Geijn's scatter and
  // all-gather).
  const int from = t_.hostOf[c.root];
  const void* const source = t_.rank == c.root ? c.input : c.output;
  const size_t pieces = (bytes + kPiece - 1) / kPiece;
  struct Slice {
    size_t first;
    size_t bytes;
  };
  const auto slice = [&](size_t piece, int rail) -> Slice {
    const size_t first = piece * kPiece;
    const size_t all = std::min(kPiece, bytes - first);
    const size_t begins = all * rail / t_.rails;
    return {first + begins, all * (rail + 1) / t_.rails - begins};
  };
  const auto part = [&](const Slice& of, int host) -> Slice {
    const size_t begins = begin(of.bytes, host);
    return {of.first + begins, begin(of.bytes, host + 1) - begins};
  };
  // Posts all receives in advance, each into its final place, so that data can arrive at any time.
  Step sends(*this);
  std::vector<std::unique_ptr<Step>> ownParts, otherParts;
  for (size_t i = 0; onRail() && host_ != from && i < pieces; ++i) {
    const auto mine = slice(i, local());
    ownParts.push_back(std::make_unique<Step>(*this));
    otherParts.push_back(std::make_unique<Step>(*this));
    const auto receive = [&](Step& step, int host, const Slice& what) {
      step.receive(host, at(c.output, what.first), what.bytes);
    };
    receive(*ownParts.back(), from, part(mine, host_));
    receive(*otherParts.back(), from, part(mine, from));
    forOtherHosts([&](int host) {
      if (host != from) receive(*otherParts.back(), host, part(mine, host));
    });
  }
  for (size_t i = 0; i < pieces; ++i) {
    const auto mine = slice(i, onRail() ? local() : 0);
    if (host_ == from) {
      const size_t first = i * kPiece;
      inside(
          {Kind::broadcast, at(source, first), at(c.output, first), std::min(kPiece, bytes - first),
           ncclInt8, t_.localOf[c.root]});
      if (onRail()) {
        forOtherHosts([&](int host) {
          for (const int which : {host, from}) {
            const auto what = part(mine, which);
            sends.send(host, at(source, what.first), what.bytes);
          }
        });
      }
      continue;
    }
    if (onRail()) {
      ownParts[i]->finish();
      const auto what = part(mine, host_);
      forOtherHosts([&](int host) {
        if (host != from) sends.send(host, at(c.output, what.first), what.bytes);
      });
      otherParts[i]->finish();
    }
    for (int rail = 0; rail < t_.rails; ++rail) {
      const auto [first, size] = slice(i, rail);
      inside({Kind::broadcast, at(c.output, first), at(c.output, first), size, ncclInt8, rail});
    }
  }
  sends.finish();
}

// Broadcasts small data, to more than kStraight hosts over a binomial tree. Hosts are numbered from
// the root's host on; each receives from the host whose number is its own without the lowest 1 bit.
void Execution::broadcastSmall(const Collective& c) {
  const size_t bytes = c.count * elementSize(c.type);
  const int from = t_.hostOf[c.root];
  const int rail = t_.railOf(c.root);
  const int number = (host_ + hosts_ - from) % hosts_;
  const auto hostAt = [&](int other) { return (other + from) % hosts_; };
  std::vector<int> children;
  if (hosts_ <= kStraight) {
    for (int child = 1; number == 0 && child < hosts_; ++child) {
      children.push_back(hostAt(child));
    }
  } else {
    for (int bit = 1; (number & bit) == 0 && number + bit < hosts_; bit *= 2) {
      children.insert(children.begin(), hostAt(number + bit));  // largest subtree first
    }
  }
  Step step(*this);
  const auto send = [&] {
    for (const int child : children) {
      step.send(child, t_.rank == c.root ? c.input : c.output, bytes);
    }
  };
  if (number != 0 && local() == rail) {
    step.receive(hostAt(hosts_ <= kStraight ? 0 : number & (number - 1)), c.output, bytes);
    step.finish();
    send();
  }
  const int root = number == 0 ? t_.localOf[c.root] : rail;
  if (t_.rank == c.root && local() == rail) {
    send();
  }
  inside(
      {Kind::broadcast, t_.rank == c.root ? c.input : c.output, c.output, c.count, c.type, root});
  if (number == 0 && t_.rank != c.root && local() == rail) {
    send();
  }
  step.finish();
}

void Execution::gather(const Collective& c) {
  const size_t bytes = c.count * elementSize(c.type);
  const int to = t_.hostOf[c.root];
  const int rail = t_.railOf(c.root);
  const int root = t_.localOf[c.root];
  const bool isRoot = t_.rank == c.root;
  const bool port = local() == rail;
  // The data of this host's ranks, on the root or on the rank that forwards the data.
  std::vector<char> own(isRoot || port ? localSize() * bytes : 0);
  inside({Kind::gather, c.input, own.data(), c.count, c.type, host_ == to ? root : rail});
  std::vector<std::vector<char>> of(hosts_);
  Step step(*this);
  if (host_ != to) {
    if (port) {
      step.send(to, own.data(), own.size());
      step.finish();
    }
    return;
  }
  std::vector<Message> hops;
  forOtherHosts([&](int host) {
    if (isRoot || port) {
      of[host].resize(t_.hosts[host].size() * bytes);
    }
    if (port) {
      step.receive(host, of[host].data(), of[host].size());
    }
    if (isRoot != port) {
      hops.push_back(hop(port, port ? root : rail, of[host].data(), of[host].size()));
    }
  });
  step.finish();
  inside(hops);
  if (isRoot) {
    of[host_] = std::move(own);
    for (int rank = 0; rank < t_.size; ++rank) {
      host::copy(
          at(c.output, rank * bytes), at(of[t_.hostOf[rank]].data(), t_.localOf[rank] * bytes),
          bytes);
    }
  }
}

void Execution::scatter(const Collective& c) {
  const size_t bytes = c.count * elementSize(c.type);
  const int from = t_.hostOf[c.root];
  const int rail = t_.railOf(c.root);
  const int root = t_.localOf[c.root];
  const bool isRoot = t_.rank == c.root;
  const bool port = local() == rail;
  std::vector<std::vector<char>> of(hosts_);
  const auto resize = [&](int host) { of[host].resize(t_.hosts[host].size() * bytes); };
  if (isRoot) {
    for (int host = 0; host < hosts_; ++host) {
      resize(host);
    }
    for (int rank = 0; rank < t_.size; ++rank) {
      host::copy(
          at(of[t_.hostOf[rank]].data(), t_.localOf[rank] * bytes), at(c.input, rank * bytes),
          bytes);
    }
  }
  Step step(*this);
  if (host_ != from && port) {
    resize(host_);
    step.receive(from, of[host_].data(), of[host_].size());
    step.finish();
  }
  inside({Kind::scatter, of[host_].data(), c.output, c.count, c.type, host_ == from ? root : rail});
  if (host_ != from) {
    return;
  }
  std::vector<Message> hops;
  forOtherHosts([&](int host) {
    if (port) {
      resize(host);
    }
    if (isRoot != port) {
      hops.push_back(hop(isRoot, isRoot ? rail : root, of[host].data(), of[host].size()));
    }
  });
  inside(hops);
  if (port) {
    forOtherHosts([&](int host) { step.send(host, of[host].data(), of[host].size()); });
  }
  step.finish();
}

}  // namespace torchcomms_pg::gloo
