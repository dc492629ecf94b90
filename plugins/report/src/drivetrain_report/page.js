(() => {
  "use strict";
  const charts = JSON.parse(document.getElementById("points").textContent);
  const tip = document.getElementById("tip");
  const plots = [...document.querySelectorAll(".plot")].map((plot) => ({
    chart: charts[plot.dataset.chart],
    area: plot.querySelector(".area"),
    cross: plot.querySelector(".cross"),
  }));

  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle; else high = middle;
    }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  };

  const hide = () => {
    tip.hidden = true;
    for (const { cross } of plots) cross.style.display = "none";
  };

  const show = (here, event) => {
    const { chart, area } = here;
    const box = area.getBoundingClientRect();
    const wanted = chart.lo + ((event.clientX - box.left) / box.width) * (chart.hi - chart.lo);
    const found = chart.s.map((s) => [s, nearest(s.x, wanted)]).filter(([s]) => s.x.length);
    if (!found.length) return;
    const step = found.map(([s, i]) => s.x[i]).reduce((a, b) => (Math.abs(b - wanted) < Math.abs(a - wanted) ? b : a));
    const lines = [chart.said ? chart.said[nearest(chart.s[0].x, wanted)] : `step ${step}`];
    for (const [s, i] of found) {
      if (s.x[i] === step && s.t[i] !== null) lines.push(found.length > 1 ? `${s.n}  ${s.t[i]}` : s.t[i]);
    }
    tip.replaceChildren(...lines.map((words) => {
      const line = document.createElement("div");
      line.textContent = words;
      return line;
    }));
    tip.hidden = false;
    const left = event.clientX + 14 + tip.offsetWidth > innerWidth ? event.clientX - 14 - tip.offsetWidth : event.clientX + 14;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 4))}px`;
    for (const { chart: other, cross } of plots) {
      const at = (step - other.lo) / (other.hi - other.lo);
      cross.style.display = at >= 0 && at <= 1 ? "block" : "none";
      cross.style.left = `${100 * at}%`;
    }
  };

  for (const plot of plots) {
    plot.area.addEventListener("pointermove", (event) => show(plot, event));
    plot.area.addEventListener("pointerdown", (event) => show(plot, event));
    plot.area.addEventListener("pointerleave", hide);
  }
  addEventListener("scroll", hide, { passive: true });
})();
