// The page works without this: it reads itself anew, and names a cell of a strip under the pointer.
(function () {
  "use strict";
  function busy(main) {
    var at = document.activeElement;
    var selected = window.getSelection && String(window.getSelection());
    return document.hidden || selected || (at && main.contains(at) && /INPUT|SELECT/.test(at.tagName));
  }
  function again() {
    var main = document.querySelector("main[data-refresh]");
    if (!main) { return; }
    var every = 1000 * Number(main.getAttribute("data-refresh"));
    setTimeout(function () {
      if (busy(main)) { again(); return; }
      fetch(location.href, { credentials: "same-origin" }).then(function (answer) {
        if (!answer.ok) { throw new Error(String(answer.status)); }
        return answer.text();
      }).then(function (text) {
        var fresh = new DOMParser().parseFromString(text, "text/html").querySelector("main");
        if (fresh) {
          var sides = Array.prototype.map.call(main.querySelectorAll(".scroll"), function (one) { return one.scrollLeft; });
          main.replaceWith(document.adoptNode(fresh));
          Array.prototype.forEach.call(document.querySelectorAll("main .scroll"), function (one, n) { one.scrollLeft = sides[n] || 0; });
        }
      }).catch(function () {
        var foot = main.querySelector(".foot");
        if (foot) { foot.textContent = "The page could not be read anew: its driver may have ended. It is tried again."; foot.classList.add("bad"); }
      }).then(again);
    }, every);
  }
  function cell(event) {
    var strip = event.target.closest ? event.target.closest("svg.heat") : null;
    var old = document.querySelector(".tip:not([hidden])");
    if (old) { old.hidden = true; }
    if (!strip) { return; }
    var box = strip.getBoundingClientRect();
    var columns = Number(strip.dataset.columns), rows = Number(strip.dataset.rows);
    var column = Math.floor((event.clientX - box.left) / box.width * columns);
    var row = Math.floor((event.clientY - box.top) / box.height * rows);
    var values = strip.dataset.values.split(" "), number = row * columns + column;
    var tip = strip.parentNode.querySelector(".tip");
    if (!tip || number < 0 || number >= values.length) { return; }
    tip.textContent = "subtask " + number + ": " + (values[number] === "-" ? "not yet" : values[number].replace("_", " "));
    tip.hidden = false;
    tip.style.left = Math.min(event.pageX + 12, document.documentElement.clientWidth - 170) + "px";
    tip.style.top = (event.pageY + 14) + "px";
  }
  document.addEventListener("pointermove", cell);
  again();
}());
