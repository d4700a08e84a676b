//! Generates `docs/settings.md` and compares it with the file.

use std::fmt::Write;

use crate::config::settings::{Fallback, MODEL_SECTION, SECTIONS};

/// The text that `docs/settings.md` must have.
fn settings_page() -> String {
    let mut page = String::from(
        "<!-- Generated from src/config by `UPDATE_DOCS=1 cargo test --lib config`. -->\n\n\
         # Settings\n\n\
         A setting is given by a flag, by an environment variable, or in a TOML file (`--config FILE`).\n\
         A flag wins over the environment, and the environment over the file. `section.key` is `key` in the\n\
         table `[section]` of the file, and `FLECHETTE_<SECTION>_<KEY>` in the environment:\n\n\
         ```toml\n[cache]\nbytes = \"4GiB\"\n```\n\n\
         ```sh\nFLECHETTE_CACHE_BYTES=4GiB flechette serve --models models\n\
         flechette serve --models models --cache-bytes 4GiB\n```\n\n\
         `serve` uses all settings, `train` those of `device`, `threads`, `versions` and `log`, `verify`\n\
         those of `device`, `threads` and `log`, `plan` those of `threads` and `log`, and other commands\n\
         those of `log`. Bytes are plain (`512`) or have a unit: K, M, G, T (1,000s) \
         or Ki, Mi,\n\
         Gi, Ti (1,024s), with or without a `B`. An unknown key, section or variable is an error, which\n\
         names the nearest known one.\n\n\
         `flechette config check` reads the settings as `serve` does, and prints what is wrong: unknown\n\
         keys, and the first wrong value of each section. With `--files` it also reads the files of\n\
         certificates, keys and tokens, and the directory of models, and warns of settings for models that\n\
         are not there. Without the flag it does not, because they may be on another machine.\n\
         `flechette config print` prints every setting with its value and where the value comes from: a\n\
         flag, a variable, a line of the file, or the default. Both take the flags of `serve` and open no\n\
         port, device or model.\n\n\
         At SIGHUP a running server reads the file again. A setting with ↻ then takes its new value. The\n\
         others are named in the log and need a restart. If anything is wrong, the log says what, and\n\
         no setting changes. Files of certificates and tokens are read in any case. It also warns of\n\
         settings for models that are not there.\n",
    );
    for section in SECTIONS.iter().flat_map(|section| {
        let own = (section.name == "models").then_some(&MODEL_SECTION);
        std::iter::once(section).chain(own)
    }) {
        let _ = write!(
            page,
            "\n## {}\n\n{}\n\n| key | default | meaning |\n|---|---|---|\n",
            section.name, section.about
        );
        for setting in section.settings {
            let flag = if setting.flag.is_empty() { String::new() } else { format!(", `{}`", setting.flag) };
            let default = match setting.default {
                Fallback::Text(text) => format!("`{text}`"),
                Fallback::Words(words) => words.to_owned(),
            };
            let reloads = if setting.reloads { " ↻" } else { "" };
            let _ = writeln!(page, "| `{}`{reloads}{flag} | {default} | {} |", setting.key, setting.about);
        }
    }
    page
}

#[test]
fn the_page_of_settings_is_up_to_date() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/settings.md");
    let page = settings_page();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(path, &page).unwrap();
    }
    let found = std::fs::read_to_string(path).unwrap_or_default();
    assert!(found == page, "docs/settings.md is stale: run UPDATE_DOCS=1 cargo test --lib config");
}
