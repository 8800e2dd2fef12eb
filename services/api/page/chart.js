// What the charts of both pages have in common: the colours of the page, marks of incidents, and their size.

import { byId } from "./dom.js";
import { si } from "./text.js";

/** Return a colour of the page's style. */
export function colourOf(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Return what all axes have. */
export function axisStyle() {
  return { stroke: colourOf("--quiet"), grid: { stroke: colourOf("--line"), width: 1 }, ticks: { stroke: colourOf("--line") } };
}

/** Return a round number of an axis; its digits behind the point are zeros mostly. */
export function axisText(value, unit = "") {
  return si(value, unit).replace(/\.0+(?= |$)/, "");
}

/**
 * A chart as wide as the element with this id. `options`: returns those of uPlot that are its own, in the colours of
 * the present scheme; `marks`: returns the places on the x axis at which incidents are marked.
 */
export class Chart {
  plot = null;
  #id;
  #height_px;
  #options;
  #marks;

  constructor(id, height_px, options, marks) {
    this.#id = id;
    this.#height_px = height_px;
    this.#options = options;
    this.#marks = marks;
    new ResizeObserver(([entry]) => this.#resize(Math.round(entry.contentRect.width))).observe(byId(id));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#makeAnew());
  }

  /** Show data, as uPlot takes them. */
  show(data) {
    if (this.plot === null) this.#make(data, byId(this.#id).clientWidth);
    else this.plot.setData(data);
  }

  #make(data, width) {
    const common = { width, height: this.#height_px, legend: { show: false }, cursor: { show: false }, hooks: { draw: [(plot) => this.#drawMarks(plot)] } };
    this.plot = new uPlot({ ...common, ...this.#options() }, data, byId(this.#id));
  }

  #makeAnew() {
    if (this.plot === null) return;
    const { data, width } = this.plot;
    this.plot.destroy();
    this.#make(data, width);
  }

  #resize(width) {
    if (this.plot !== null && width > 0 && width !== this.plot.width) this.plot.setSize({ width, height: this.#height_px });
  }

  #drawMarks({ ctx, bbox, valToPos }) {
    ctx.save();
    ctx.strokeStyle = colourOf("--bad");
    ctx.lineWidth = 2 * devicePixelRatio;
    ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
    for (const place of this.#marks()) {
      const x = valToPos(place, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }
}
