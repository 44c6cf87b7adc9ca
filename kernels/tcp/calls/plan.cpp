#include "tcp/calls/plan.h"

#include <algorithm>

#include "core/segments.h"
#include "core/slices.h"

namespace allreduce::tcp {
namespace {

// Builds the stages of one member.
class Planner {
 public:
  Planner(const Request& request, int me, int members) : request_(request), me_(me), n_(members) {}

  std::vector<Stage> stages;

  // All members' contributions to one slice, reduced at `end`, which stores the result at `out` of
  // its output or, with `through`, passes it on. `in` is where the slice lies in each input.
  void reduce(std::uint32_t id, int end, std::uint64_t elements, std::uint64_t in, std::int64_t out,
              std::int64_t passing, const std::vector<Link>& onward) {
    const bool direct = request_.call.path == Path::direct;
    const bool windowed = direct || passing == kNowhere;
    const int place = (me_ - end - 1 + n_) % n_;  // along the chain, which ends at n - 1
    Stage stage{.id = id, .elements = elements, .in = signed_of(in)};
    if (me_ == end) {
      stage.from = direct ? others() : std::vector<int>{before()};
      stage.to = onward;
      stage.out = out;
      stage.reduce = stage.last = true;
      stage.windowed = windowed;
    } else if (direct) {
      stage.to = {{end, id, true}};
    } else {
      stage.to = {{after(), id, windowed}};
      if (place > 0) {
        stage.from = {before()};
        stage.out = passing;
        stage.reduce = true;
        stage.windowed = windowed;
      }
    }
    stages.push_back(stage);
  }

  // One member's data goes to all others, which store it at `out`. The first stage is the caller's.
  std::vector<Link> spread_links(std::uint32_t id, int root) const {
    if (n_ == 1) return {};
    if (request_.call.path == Path::chain) return {{(root + 1) % n_, id, false}};
    std::vector<Link> links;
    for (int step = 1; step < n_; ++step) links.push_back({(root + step) % n_, id, false});
    return links;
  }
  void spread_to_me(std::uint32_t id, int root, std::uint64_t elements, std::uint64_t out) {
    if (request_.call.path != Path::chain) return store(id, root, elements, out);
    store(id, before(), elements, out);
    if (after() != root) stages.back().to = {{after(), id, false}};
  }
  void origin(std::uint32_t id, std::vector<Link> to, std::uint64_t elements, std::uint64_t in,
              std::int64_t out) {
    stages.push_back(
        {.id = id, .to = std::move(to), .elements = elements, .in = signed_of(in), .out = out});
  }
  void store(std::uint32_t id, int from, std::uint64_t elements, std::uint64_t out) {
    stages.push_back({.id = id, .from = {from}, .elements = elements, .out = signed_of(out)});
  }
  static std::int64_t signed_of(std::uint64_t value) { return static_cast<std::int64_t>(value); }

 private:
  int before() const { return (me_ + n_ - 1) % n_; }
  int after() const { return (me_ + 1) % n_; }
  std::vector<int> others() const {
    std::vector<int> found;
    for (int member = 0; member < n_; ++member)
      if (member != me_) found.push_back(member);
    return found;
  }

  const Request& request_;
  const int me_;
  const int n_;
};

void plan_all_reduce(Planner& planner, const Request& r, int me, int n) {
  for (int s = 0; s < n; ++s) {
    const auto [low, high] = slice_of(r.call.count, r.element(), n, s);
    const std::uint64_t size = high - low;
    const auto id = static_cast<std::uint32_t>(s), second = static_cast<std::uint32_t>(n + s);
    const std::int64_t out = Planner::signed_of(low);
    planner.reduce(id, s, size, low, out, out, planner.spread_links(second, s));
    if (me != s) planner.spread_to_me(second, s, size, low);
  }
}

void plan_reduce(Planner& planner, const Request& r, int me, int n) {
  if (r.call.path == Path::chain)
    return planner.reduce(0, r.call.root, r.call.count, 0, me == r.call.root ? 0 : kNowhere,
                          kNowhere, {});
  // Each member reduces its slice, and the root gathers them.
  for (int s = 0; s < n; ++s) {
    const auto [low, high] = slice_of(r.call.count, r.element(), n, s);
    const std::uint64_t size = high - low;
    const auto id = static_cast<std::uint32_t>(s), second = static_cast<std::uint32_t>(n + s);
    const bool at_root = s == r.call.root;
    planner.reduce(id, s, size, low, at_root ? Planner::signed_of(low) : kNowhere, kNowhere,
                   at_root ? std::vector<Link>{} : std::vector<Link>{{r.call.root, second, false}});
    if (me == r.call.root && !at_root) planner.store(second, s, size, low);
  }
}

void plan_reduce_scatter(Planner& planner, const Request& r, int n) {
  for (int s = 0; s < n; ++s) {
    const Segment share = share_of(r, s);
    planner.reduce(static_cast<std::uint32_t>(s), s, share.count, share.low, 0, kNowhere, {});
  }
}

void plan_all_gather(Planner& planner, const Request& r, int me, int n) {
  for (int step = 0; step < n; ++step) {
    const int s = (me + n - step) % n;
    const auto id = static_cast<std::uint32_t>(s);
    const Segment share = share_of(r, s);
    if (s == me)
      planner.origin(id, planner.spread_links(id, s), share.count, 0,
                     Planner::signed_of(share.low));
    else
      planner.spread_to_me(id, s, share.count, share.low);
  }
}

void plan_gather(Planner& planner, const Request& r, int me, int n) {
  if (me != r.call.root)
    return planner.origin(0, {{r.call.root, static_cast<std::uint32_t>(me), false}},
                          share_of(r, me).count, 0, kNowhere);
  for (int s = 0; s < n; ++s) {
    const auto id = static_cast<std::uint32_t>(s);
    const Segment share = share_of(r, s);
    if (s == me)
      planner.origin(id, {}, share.count, 0, Planner::signed_of(share.low));
    else
      planner.store(id, s, share.count, share.low);
  }
}

void plan_scatter(Planner& planner, const Request& r, int me, int n) {
  if (me != r.call.root) return planner.store(0, r.call.root, share_of(r, me).count, 0);
  for (int s = 0; s < n; ++s) {
    const std::vector<Link> to = s == me ? std::vector<Link>{} : std::vector<Link>{{s, 0, false}};
    const Segment share = share_of(r, s);
    planner.origin(static_cast<std::uint32_t>(s), to, share.count, share.low,
                   s == me ? 0 : kNowhere);
  }
}

void plan_broadcast(Planner& planner, const Request& r, int me) {
  if (me == r.call.root)
    planner.origin(0, planner.spread_links(0, r.call.root), r.call.count, 0, 0);
  else
    planner.spread_to_me(0, r.call.root, r.call.count, 0);
}

void plan_all_to_all(Planner& planner, const Request& r, int me, int n) {
  for (int step = 0; step < n; ++step) {
    const int to = (me + step) % n, from = (me + n - step) % n;
    const auto id = static_cast<std::uint32_t>(n + to);
    const Segment out = given(r, me, to), in = taken(r, me, from);
    if (step == 0) {
      planner.origin(id, {}, out.count, out.low, Planner::signed_of(in.low));
      continue;
    }
    planner.origin(id, {{to, static_cast<std::uint32_t>(me), false}}, out.count, out.low, kNowhere);
    planner.store(static_cast<std::uint32_t>(from), from, in.count, in.low);
  }
}

void plan_stages(Planner& planner, const Request& request, int me, int members) {
  switch (request.call.collective) {
    case Collective::all_reduce:
      return plan_all_reduce(planner, request, me, members);
    case Collective::reduce:
      return plan_reduce(planner, request, me, members);
    case Collective::reduce_scatter:
      return plan_reduce_scatter(planner, request, members);
    case Collective::all_gather:
      return plan_all_gather(planner, request, me, members);
    case Collective::gather:
      return plan_gather(planner, request, me, members);
    case Collective::scatter:
      return plan_scatter(planner, request, me, members);
    case Collective::broadcast:
      return plan_broadcast(planner, request, me);
    case Collective::all_to_all:
      return plan_all_to_all(planner, request, me, members);
    case Collective::send:
      return planner.origin(0, {{request.call.root, 0, false}}, request.call.count, 0, kNowhere);
    case Collective::recv:
      return planner.store(0, request.call.root, request.call.count, 0);
    case Collective::barrier:
    case Collective::allocate:
      return;
  }
}

// Chunks are shorter, and then fewer, where many have to be staged, so that a call's staging stays
// bounded. All members have to cut alike.
void cut_chunks(Plan& plan, const Request& request, int members) {
  const bool staged =
      request.call.collective == Collective::reduce ||
      request.call.collective == Collective::reduce_scatter ||
      (request.call.collective == Collective::all_reduce && request.call.path == Path::direct);
  std::uint64_t bytes = request.chunk;
  plan.window = kWindow;
  if (staged) {
    // At most as many flows meet at a member as there are others.
    const auto flows = static_cast<std::uint64_t>(std::max(1, members - 1));
    plan.window = std::clamp<std::uint64_t>(kStaging / (flows * kLeastChunk), 1, kWindow);
    bytes = std::min(bytes, kStaging / (flows * plan.window));
  }
  plan.chunk = std::max<std::uint64_t>(1, bytes / request.element());
}

}  // namespace

bool Plan::windowed() const {
  return std::any_of(stages.begin(), stages.end(), [](const Stage& s) { return s.windowed; });
}

Plan make_plan(const Request& request, int me, int members) {
  Planner planner(request, me, members);
  plan_stages(planner, request, me, members);
  Plan plan{std::move(planner.stages)};
  cut_chunks(plan, request, members);
  return plan;
}

}  // namespace allreduce::tcp
