// For those who hear the pages: a name that the theme leaves out.
document.querySelector(".md-search")?.setAttribute("aria-label", "Search")
