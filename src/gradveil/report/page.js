"use strict";
(() => {
  const $ = (selector, root = document) => root.querySelector(selector);
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const data = JSON.parse($("#data").textContent);

  const make = (tag, properties = {}, ...children) => {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  };

  // A component's spec, which may break into lines between its settings only.
  const broken = (text) => text.split(/(?<=[:,+/])/).flatMap((piece) => [piece, document.createElement("wbr")]);

  // Tables. A source says what stands in row i, and draws rows in an order; sorting and filtering are the same for all.
  function table(id, source) {
    const bar = $(`[data-for="${id}"]`);
    const search = $("input", bar);
    const selects = all("select", bar);
    const heads = all(`#${id} thead th`);
    let column = -1;
    let sign = 1;

    const compare = (a, b) => {
      const [x, y] = [source.value(a, column), source.value(b, column)];
      const [noX, noY] = [x === null || x === "", y === null || y === ""];
      if (noX || noY) return noX - noY || a - b; // what is missing stands last, whichever way
      const order = typeof x === "number" ? x - y : x.localeCompare(y, "en", { numeric: true });
      return sign * order || a - b;
    };
    const update = () => {
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      const chosen = selects.filter((select) => select.value);
      const order = [];
      for (let i = 0; i < source.count; i++) {
        if (chosen.some((select) => source.facet(i, select.dataset.facet) !== select.value)) continue;
        if (words.length && !words.every((word) => source.text(i).includes(word))) continue;
        order.push(i);
      }
      if (column >= 0) order.sort(compare);
      $(".status", bar).textContent =
        order.length === source.count ? `${source.count} rows` : `${order.length} of ${source.count} rows`;
      source.draw(order);
    };
    heads.forEach((head, index) =>
      $("button", head).addEventListener("click", () => {
        const first = head.classList.contains("text") ? 1 : -1; // figures: the largest first
        sign = column === index ? -sign : first;
        column = index;
        heads.forEach((other) => other.setAttribute("aria-sort", "none"));
        head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
        update();
      }),
    );
    search.addEventListener("input", update);
    selects.forEach((select) => select.addEventListener("change", update));
    update();
  }

  function summary() {
    const body = $("#summary tbody");
    if (!body) return; // an audit of membership alone
    const rows = [...body.rows];
    const texts = rows.map((row) => row.textContent.toLowerCase());
    table("summary", {
      count: rows.length,
      value: (i, column) => {
        const cell = rows[i].cells[column];
        if (cell.dataset.v !== undefined) return Number(cell.dataset.v);
        return cell.classList.contains("number") ? null : cell.textContent;
      },
      facet: (i, name) => rows[i].dataset[name],
      text: (i) => texts[i],
      draw: (order) => body.replaceChildren(...order.map((i) => rows[i])),
    });
  }

  const written = {
    "%": (value) => `${(100 * value).toFixed(1)} %`,
    "×": (value) => `${value.toFixed(2)}×`,
    g: (value) => (Math.abs(value) >= 1e-3 && Math.abs(value) < 1e6 ? String(+value.toPrecision(4)) : value.toExponential(2)),
  };

  function rows() {
    const PAGE = matchMedia("(max-width: 720px)").matches ? 10 : 100; // a row is a card on a phone
    const columns = data.rows.filter((column) =>
      column.kind === "text" ? column.texts.some(Boolean) : column.cells.some((cell) => cell !== null),
    );
    const count = columns.length ? columns[0].cells.length : 0;
    const byKey = Object.fromEntries(data.rows.map((column) => [column.key, column]));
    const raw = (i, column) => (column.kind === "text" ? column.texts[column.cells[i]] : column.cells[i]);
    const shown = (i, column) => {
      const value = raw(i, column);
      if (column.kind === "text") return value;
      if (value === null) return "–";
      return (written[column.kind] || ((x) => x.toFixed(Number(column.kind))))(value);
    };
    const kind = (column) => (column.kind === "text" ? "text" : "number") + (column.more ? " more" : "");
    $("#all thead").append(
      make("tr", {}, ...columns.map((column) => {
        const head = make("th", { scope: "col", className: kind(column) }, make("button", { type: "button" }, column.head));
        head.setAttribute("aria-sort", "none");
        return head;
      })),
    );
    const texts = columns.filter((column) => column.kind === "text");
    const hay = [];
    const pager = $(".pager");
    let current = [];
    let page = 0;
    const draw = () => {
      const last = Math.max(0, Math.ceil(current.length / PAGE) - 1);
      page = Math.min(Math.max(page, 0), last);
      const body = current.slice(page * PAGE, (page + 1) * PAGE).map((i) =>
        make("tr", {}, ...columns.map((column) => {
          const text = shown(i, column);
          const long = column.note;
          const cell = make("td", { className: kind(column) + (long ? " note" : ""), title: long ? text : "" }, text);
          cell.dataset.head = column.head;
          return cell;
        })),
      );
      $("#all tbody").replaceChildren(...body);
      pager.hidden = last === 0;
      $("span", pager).textContent = `${page * PAGE + 1}–${Math.min(current.length, (page + 1) * PAGE)} of ${current.length}`;
      all("button", pager).forEach((button) => (button.disabled = page + Number(button.dataset.move) !== Math.min(Math.max(page + Number(button.dataset.move), 0), last)));
    };
    all("button", pager).forEach((button) =>
      button.addEventListener("click", () => {
        page += Number(button.dataset.move);
        draw();
      }),
    );
    table("all", {
      count,
      value: (i, column) => raw(i, columns[column]),
      facet: (i, name) => raw(i, byKey[name]),
      text: (i) => (hay[i] ??= texts.map((column) => raw(i, column)).join(" ").toLowerCase()),
      draw: (order) => {
        current = order;
        page = 0;
        draw();
      },
    });
  }

  // Pictures. Each line has one sheet: a column for each picture, a row for each iterate.
  function gallery() {
    const { columns, lines } = data;
    if (!columns.length) return;
    const slider = $("#step");
    const most = slider ? Number(slider.max) : 0;
    const seed = $("#seed");
    const truths = {}; // one for all lines, and one for each defence that draws images of its own
    const truthOf = (line) => (truths[line.truth_sheet] ??= {
      truth: true, psnr: [columns.map(() => null)], there: line.labels ? line.there : columns.map(() => 1),
      sheet: line.truth_sheet, labels: line.labels ?? columns.map(({ label }) => label), steps: [],
    });
    lines.forEach((line, index) => (line.sheet = index + 1));
    const sheets = [];
    const load = (number) => (sheets[number] ??= (async () => {
      const image = new Image();
      image.src = `data:image/png;base64,${$(`#sheet-${number}`).textContent}`;
      await image.decode();
      return image;
    })());
    const row = (line) => {
      const last = line.psnr.length - 1;
      return most ? Math.round((last * Number(slider.value)) / most) : last;
    };
    const paint = (canvas, image, line, column) => {
      const [width, height] = [image.width / columns.length, image.height / line.psnr.length];
      canvas.width = width;
      canvas.height = height;
      canvas.getContext("2d").drawImage(image, column * width, row(line) * height, width, height, 0, 0, width, height);
    };
    const decibel = (line, column) => {
      const value = line.psnr[row(line)][column];
      return value === null ? "no guess" : value.toFixed(1);
    };
    const named = (line, column) => {
      const { target, image, round } = columns[column];
      const label = (line.labels ?? columns.map((each) => each.label))[column];
      return `Target ${target}${round ? ` of round ${round}` : ""}${data.images > 1 ? `, image ${image}` : ""}, ${data.classes[label] ?? `label ${label}`}`;
    };
    const attacker = (line) => (line.truth ? "truth" : `${line.attack}, ${line.adaptive ? "knows the defence" : "plain"}`);
    const strips = []; // those that are built and have their picture

    const refresh = (strip) => {
      const { line, image, tiles, step } = strip;
      tiles.forEach((tile, column) => {
        if (!tile) return;
        paint(tile.canvas, image, line, column);
        if (line.truth) return;
        tile.caption.textContent = decibel(line, column);
        tile.button.setAttribute("aria-label", `${named(line, column)}; ${attacker(line)}: PSNR ${decibel(line, column)}`);
      });
      if (step && line.steps.length) step.textContent = `step ${line.steps[row(line)].toLocaleString("en")}`;
    };

    const tileOf = (line, column, element) => {
      if (!line.there[column]) {
        element.append(make("div", { className: "tile" }, make("span", { className: "absent", title: "no image, or not attacked yet" }, "–")));
        return null;
      }
      const canvas = make("canvas", { width: 1, height: 1 });
      const button = make("button", { type: "button", tabIndex: -1 }, canvas);
      button.setAttribute("aria-label", `${named(line, column)}; ${attacker(line)}`);
      const caption = make("span", {}, line.truth ? `${data.classes[line.labels[column]] ?? line.labels[column]}` : "");
      button.addEventListener("click", () => open(line, column));
      element.append(make("div", { className: "tile" }, button, caption));
      return { canvas, button, caption };
    };

    const build = (line) => {
      const element = make("div", { className: line.truth ? "strip truth" : "strip" });
      element.setAttribute("role", "group");
      element.setAttribute("aria-label", attacker(line));
      element.style.setProperty("--count", columns.length);
      const step = make("small", {}, "");
      const who = make("div", { className: "who" });
      if (line.truth) who.append(make("b", {}, "Truth"), make("small", {}, data.classes.length ? "class below" : "label below"));
      else {
        const mark = make("i", { className: line.adaptive ? "mark filled" : "mark" });
        who.append(make("span", {}, mark, make("b", {}, ...broken(line.attack))), make("small", {}, line.adaptive ? "knows the defence" : "plain"), step);
      }
      element.append(who);
      const tiles = columns.map((_, column) => tileOf(line, column, element));
      const buttons = tiles.filter(Boolean).map((tile) => tile.button);
      if (buttons.length) buttons[0].tabIndex = 0; // one tab stop a line; the arrows move along it
      element.addEventListener("keydown", (event) => {
        const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        const next = buttons[buttons.indexOf(document.activeElement) + move];
        if (!move || !next) return;
        event.preventDefault();
        buttons.forEach((button) => (button.tabIndex = button === next ? 0 : -1));
        next.focus();
      });
      load(line.sheet).then((image) => {
        if (!element.isConnected) return;
        const strip = { line, image, tiles, step };
        strips.push(strip);
        refresh(strip);
      });
      return element;
    };

    const linesOf = (block) =>
      lines.filter((line) => line.defence === block.dataset.defence && (!seed || line.seed === Number(seed.value)));
    const fill = (block) => {
      if (block.dataset.built) return;
      block.dataset.built = "yes";
      const drawn = $(".strips", block);
      const own = linesOf(block);
      drawn.replaceChildren(...(own.length ? [truthOf(own[0])] : []).map(build), ...own.map(build));
      drawn.style.minHeight = "";
    };
    const blocks = all(".block");
    const watch = new IntersectionObserver(
      (entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => fill(entry.target)),
      { rootMargin: "600px" },
    );
    const restart = () => {
      strips.length = 0;
      blocks.forEach((block) => {
        delete block.dataset.built;
        const drawn = $(".strips", block);
        drawn.style.minHeight = drawn.offsetHeight ? `${drawn.offsetHeight}px` : `${7 * (1 + linesOf(block).length)}rem`;
        drawn.replaceChildren();
        watch.unobserve(block);
        watch.observe(block);
      });
    };
    restart();
    if (seed) seed.addEventListener("change", restart);
    const tiles = columns.length * (lines.length + blocks.length);
    if (tiles < 3000) { // few enough to have them all ready for printing
      const rest = () => {
        const next = blocks.find((block) => !block.dataset.built);
        if (!next) return;
        fill(next);
        later(rest);
      };
      const later = window.requestIdleCallback || ((work) => setTimeout(work, 50));
      later(rest);
    }

    // The slider moves all pictures; a line with fewer iterates moves less often.
    let timer = 0;
    const play = $("#play");
    const moved = () => {
      const at = Number(slider.value);
      const text = at === most ? "end" : at === 0 ? "start" : `${Math.round((100 * at) / most)} %`;
      $("#where").textContent = text;
      slider.setAttribute("aria-valuetext", text);
      strips.forEach(refresh);
    };
    const stop = () => {
      clearInterval(timer);
      timer = 0;
      play.textContent = "▶ Play";
      play.setAttribute("aria-pressed", "false");
    };
    const go = () => {
      if (Number(slider.value) === most) slider.value = 0;
      play.textContent = "❚❚ Pause";
      play.setAttribute("aria-pressed", "true");
      moved();
      timer = setInterval(() => {
        slider.value = Number(slider.value) + 1;
        moved();
        if (Number(slider.value) === most) stop();
      }, Math.max(250, 3000 / most));
    };
    if (slider) {
      slider.value = most; // whatever the browser remembers from before
      slider.addEventListener("input", () => { stop(); moved(); });
      play.addEventListener("click", () => (timer ? stop() : go()));
      moved();
    }

    // Full size, beside the truth.
    const dialog = $("#large");
    const [left, right] = all("canvas", dialog);
    let at = null;
    const show = async (line, column) => {
      at = { line, column };
      const truth = line.truth ? line : truthOf(line);
      const [true_, guess] = await Promise.all([load(truth.sheet), load(line.sheet)]);
      paint(left, true_, truth, column);
      paint(right, guess, line, column);
      right.parentElement.hidden = Boolean(line.truth);
      $("h2", dialog).textContent = line.truth ? named(line, column) : `${named(line, column)}: ${attacker(line)}, under ${line.defence}`;
      const last = row(line) === line.psnr.length - 1;
      const ssim = last && !line.truth && line.ssim[column] !== null ? `, SSIM ${line.ssim[column].toFixed(3)}${data.images > 1 ? " (mean of the batch)" : ""}` : "";
      const step = line.steps.length ? `, after ${line.steps[row(line)].toLocaleString("en")} steps` : "";
      const guessed = line.truth || line.guessed[column];
      $(".figures", dialog).textContent = line.truth ? "" : guessed ? `PSNR ${decibel(line, column)} dB${ssim}${step}` : "The attack made no guess.";
    };
    const open = (line, column) => show(line, column).then(() => dialog.open || dialog.showModal());
    dialog.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!move) return;
      let next = at.column + move;
      while (next in columns && !at.line.there[next]) next += move;
      if (next in columns) show(at.line, next);
    });
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  }

  function plane() {
    all("[name=metric]").forEach((choice) =>
      choice.addEventListener("change", () =>
        all(".drawing").forEach((drawing) => (drawing.hidden = drawing.dataset.metric !== choice.value)),
      ),
    );
  }

  summary();
  rows();
  plane();
  gallery();
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
})();
