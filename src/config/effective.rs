//! The effective configuration as text.

use std::fmt::Write;

use super::Config;
use super::layers::Layers;
use super::settings::{Fallback, SECTIONS};

impl Layers {
    /// Every setting with its value and the source of the value, and those that models have for themselves.
    /// The text can be used as a file. A setting without a value is a comment. `config` is that of these
    /// layers.
    pub(crate) fn to_toml(&self, config: &Config) -> String {
        let mut text = String::new();
        for section in SECTIONS {
            let gap = if text.is_empty() { "" } else { "\n" };
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{gap}[{}]", section.name);
            for setting in section.settings {
                let name = setting.key.split_once('.').map_or(setting.key, |(_, name)| name);
                let source = self.source(setting.key).map_or("default".to_owned(), ToString::to_string);
                let value = self.text(setting.key).map(str::to_owned);
                let _ = match (value.or_else(|| computed(config, setting.key)), setting.default) {
                    (Some(value), _) => writeln!(text, "{name} = {}  # {source}", quoted(&value)),
                    (None, Fallback::Words(words)) => writeln!(text, "# {name}: {words}  # {source}"),
                    (None, Fallback::Text(_)) => Ok(()),
                };
            }
        }
        for (model, keys) in self.of_models() {
            let _ = writeln!(text, "\n[models.{}]", toml::Value::String(model.to_owned()));
            for (key, name) in keys {
                if let Some(given) = self.given.get(key) {
                    let _ = writeln!(text, "{name} = {}  # {}", quoted(given.text.trim()), given.source);
                }
            }
        }
        text
    }
}

/// The value of a default that depends on other settings or on the machine.
fn computed(config: &Config, key: &str) -> Option<String> {
    match key {
        "server.max_inflight_bytes" => Some(config.server.max_inflight_bytes.to_string()),
        "learn.segment_bytes" => Some(config.learn.segment_bytes.to_string()),
        "batcher.queue_bytes" => Some(config.batchers.common.queue_bytes.to_string()),
        "server.reflection" => Some(switch(config.server.reflection)),
        "server.admin" => Some(switch(config.server.admin)),
        "batcher.queue_samples" => Some(config.batchers.common.queue_samples.to_string()),
        "cache.low_watermark" => Some(config.cache.low_watermark.to_string()),
        "device.kernel_cache" => {
            let folder = config.device.kernel_cache.as_ref();
            Some(folder.map_or("off".to_owned(), |folder| folder.display().to_string()))
        }
        _ => None,
    }
}

fn switch(on: bool) -> String {
    if on { "on" } else { "off" }.to_owned()
}

/// A value of TOML: a number if it is one, otherwise a string. TOML does not have all numbers that the
/// settings have: `007` and `.5` are strings.
fn quoted(value: &str) -> String {
    let digits = value.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    match value.parse() {
        Ok(toml::Value::Integer(_) | toml::Value::Float(_)) if digits => value.to_owned(),
        _ => toml::Value::String(value.to_owned()).to_string(),
    }
}
