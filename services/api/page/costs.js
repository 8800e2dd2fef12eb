// The cost report: what all allocated time was used for, and what failures have cost.

import { byId, element, keyed } from "./dom.js";
import { money, percent } from "./text.js";

const USES = {
  useful: "training",
  detection: "until faults were known",
  transition_incident: "stopping and starting because of faults",
  transition_planned: "stopping and starting as planned",
  recompute: "steps computed again",
  lost: "workers on lost nodes",
  sub_healthy: "fewer workers than before a fault",
  unscheduled: "no task wants the workers",
  idle: "idle though a task wants workers",
};
const HOUR_S = 3600;

/** Show a cost report. */
export function showCosts(costs) {
  const currency = costs.currency;
  const totals = [
    ["allocated", money(costs.allocated_money, currency)],
    ["failures", money(costs.totals.failure_money, currency)],
    ["goodput", percent(costs.service.goodput_fraction)],
    ["availability", percent(costs.service.availability)],
    ["WAF of the healthy line", percent(costs.service.waf_fraction)],
  ];
  keyed(byId("cost-totals"), totals, {
    key: ([name]) => name,
    make: ([name]) => element("div", {}, element("dt", {}, name), element("dd")),
    update: (item, [, value]) => { item.lastChild.textContent = value; },
  });
  const uses = Object.entries(costs.categories).filter(([, worker_s]) => worker_s > 0);
  keyed(byId("cost-rows"), uses, {
    key: ([use]) => use,
    make: ([use]) => element("tr", {}, element("th", { scope: "row" }, USES[use] ?? use),
      ...[0, 1, 2].map(() => element("td", { class: "n" }))),
    update: (row, [, worker_s]) => {
      const hours = worker_s / HOUR_S;
      const texts = [hours.toFixed(2), percent(worker_s / costs.allocated_worker_s),
        money(hours * costs.price_per_worker_hour, currency)];
      texts.forEach((text, index) => { row.children[index + 1].textContent = text; });
    },
    shown: (use) => [use, costs.allocated_worker_s, costs.price_per_worker_hour],
  });
}
