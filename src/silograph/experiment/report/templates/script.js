"use strict";
// Values under the pointer, or under a cursor moved by the arrow keys. The page is whole without it.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const shown = (v) => (Math.abs(v) >= 1000 ? v.toLocaleString("en") : String(Number(v.toPrecision(4))));
  const nearest = (xs, x) => {
    let best = 0;
    xs.forEach((v, i) => { if (Math.abs(v - x) < Math.abs(xs[best] - x)) best = i; });
    return best;
  };
  const line = (name, value, look) => {
    const row = document.createElement("div");
    const left = document.createElement("span");
    const right = document.createElement("b");
    left.textContent = name;
    left.className = look;
    right.textContent = value;
    row.append(left, right);
    return row;
  };
  for (const plot of document.querySelectorAll(".plot[data-figure]")) {
    const series = data.figures[plot.dataset.figure].series;
    const tip = plot.querySelector(".tip");
    let place = null;
    const panelNow = () => [...plot.querySelectorAll(".panel")].find((p) => p.offsetParent !== null);
    const hide = () => {
      tip.hidden = true;
      plot.querySelectorAll(".cursor").forEach((c) => { c.hidden = true; });
    };
    const show = (panel, x) => {
      const { unit } = panel.dataset;
      const [low, high] = [Number(panel.dataset.low), Number(panel.dataset.high)];
      const several = data.axes.length > 1;
      const reaches = (xs) => !several || (xs[0] <= x && x <= xs[xs.length - 1]);
      const found = series.filter((s) => reaches(data.axes[s.axis][unit])).map((s) => {
        const i = nearest(data.axes[s.axis][unit], x);
        return { s, i, y: s.y[i] };
      }).filter((f) => f.y !== null);
      if (!found.length) { hide(); return; }
      const axis = data.axes[found[0].s.axis];
      const at = several ? x : axis[unit][found[0].i];
      const cursor = panel.querySelector(".cursor");
      const share = (at - low) / (high - low);
      cursor.hidden = false;
      cursor.style.left = `${100 * share}%`;
      tip.replaceChildren();
      if (!several) {
        const i = found[0].i;
        tip.append(line(`round ${axis.round[i]}`, `${shown(axis.bytes[i] / 1e6)} MB, ${shown(axis.seconds[i])} s`, ""));
      } else {
        tip.append(line(unit, unit === "bytes" ? `${shown(x / 1e6)} MB` : shown(x), ""));
        found.sort((a, b) => b.y - a.y);
      }
      for (const f of found.slice(0, 12)) tip.append(line(f.s.name, shown(f.y), f.s.look.split(" ")[0]));
      if (found.length > 12) tip.append(line(`and ${found.length - 12} more`, "", ""));
      tip.hidden = false;
      const area = panel.querySelector(".area");
      const left = area.offsetLeft + share * area.offsetWidth;
      const room = plot.clientWidth - tip.offsetWidth;
      const side = share > 0.5 ? left - tip.offsetWidth - 12 : left + 12;
      tip.style.left = `${Math.max(0, Math.min(side, room))}px`;
    };
    plot.addEventListener("pointermove", (event) => {
      const panel = panelNow();
      const box = panel.querySelector(".area").getBoundingClientRect();
      const share = Math.max(0, Math.min(1, (event.clientX - box.left) / box.width));
      const [low, high] = [Number(panel.dataset.low), Number(panel.dataset.high)];
      place = nearest(data.axes[series[0].axis][panel.dataset.unit], low + share * (high - low));
      show(panel, low + share * (high - low));
    });
    plot.addEventListener("pointerleave", hide);
    plot.addEventListener("blur", hide);
    plot.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
      if (event.key === "Escape") hide();
      if (step === undefined) return;
      event.preventDefault();
      const panel = panelNow();
      const xs = data.axes[series[0].axis][panel.dataset.unit];
      place = place === null && Number.isFinite(step) ? 0 : Math.max(0, Math.min(xs.length - 1, (place ?? 0) + step));
      show(panel, xs[place]);
    });
  }
})();
