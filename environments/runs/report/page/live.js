// A run as it goes: new rollouts, figures and curves come as server-sent events. Only pages that `view --live` serves.

const short = (value) => String(Number(value.toPrecision(3)));

function curve(title, points, along) {
  const width = 320, height = 110, left = 40, foot = 92, xs = points.map((p) => p[0]), ys = points.map((p) => p[1]);
  const low = Math.min(...ys), high = Math.max(...ys), span = high - low || 1, wide = Math.max(1, Math.max(...xs) - Math.min(...xs));
  const x = (value) => left + ((value - Math.min(...xs)) / wide) * (width - left - 8), y = (value) => foot - ((value - low) / span) * (foot - 12);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "curve", role: "img", "aria-label": title + ", last " + short(ys.at(-1)) });
  picture.append(svg("polyline", { points: points.map(([a, b]) => x(a).toFixed(1) + "," + y(b).toFixed(1)).join(" ") }));
  for (const [a, b] of points) picture.append(svg("circle", { cx: x(a), cy: y(b), r: 2.5 }));
  if (high > low) picture.append(svg("text", { x: 0, y: 16 }, short(high)));
  picture.append(svg("text", { x: 0, y: foot }, short(low)),
    svg("text", { x: left, y: height - 2 }, along + " " + Math.min(...xs)), ...(Math.max(...xs) > Math.min(...xs) ? [svg("text", { x: width - 8, y: height - 2, "text-anchor": "end" }, along + " " + Math.max(...xs))] : []));
  return picture;
}

function drawLive(live, connected) {
  const box = byId("live");
  box.hidden = false;
  const facts = Object.entries(live.facts || {});
  replace(box,
    h("div", { class: "card" }, h("h2", {}, h("i", { class: "pulse" + (connected ? "" : " off") }), connected ? "Live" : "Not connected: the page asks again"), pairs("", facts)),
    h("div", { class: "curves" }, Object.entries(live.curves || {}).filter(([, points]) => points.length)
      .map(([title, points]) => h("div", { class: "card" }, h("h2", {}, title + ": " + short(points.at(-1)[1])), curve(title, points, live.along)))));
}

/** Follow the run; `onRollouts` gets what is new. */
function follow(onRollouts) {
  const source = new EventSource("events?from=" + data.rollouts.length);
  let last = data.live;
  drawLive(last, false);
  source.addEventListener("open", () => drawLive(last, true));
  source.addEventListener("error", () => drawLive(last, false));
  source.addEventListener("again", () => location.reload());
  source.addEventListener("run", (event) => {
    const news = JSON.parse(event.data);
    last = news.live;
    drawLive(last, true);
    onRollouts(news);
  });
}
