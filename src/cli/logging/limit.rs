//! At most [`LINES`] warnings and errors of one call site in a minute, so that no client and no fault can
//! fill the disk or hide other lines. At the end of the minute a line says how many were left out.
//!
//! This is a filter of the log, so no call site has to do anything. Lines at other levels are not limited: at
//! `debug` they are wanted, and at `info` they say what an operator has done.

use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tracing::callsite::Identifier;
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::{Context, Filter};

use crate::sync::EvenPoisoned;

/// Most lines of a call site in a [`PERIOD`].
const LINES: u32 = 20;
const PERIOD: Duration = Duration::from_secs(60);

/// The call sites of this process.
static SITES: Mutex<Sites> = Mutex::new(Sites { all: Vec::new(), reported: false });

/// The filter.
pub(crate) struct Limit;

impl<S: Subscriber> Filter<S> for Limit {
    fn enabled(&self, _: &Metadata<'_>, _: &Context<'_, S>) -> bool {
        true
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::TRACE)
    }

    fn event_enabled(&self, event: &Event<'_>, _: &Context<'_, S>) -> bool {
        let line = event.metadata();
        if *line.level() > Level::WARN {
            return true;
        }
        let mut sites = sites();
        let allowed = sites.allow(line, Instant::now());
        if !allowed && !sites.reported {
            // Nothing can be logged here. Without a thread the lines are reported at the end.
            let thread = std::thread::Builder::new().name("log".into()).spawn(report_when_due);
            sites.reported = thread.is_ok();
        }
        allowed
    }
}

/// Reports all lines that were left out, before the process ends.
pub(crate) fn end() {
    report(Duration::ZERO);
}

/// Reports lines until none are left out.
fn report_when_due() {
    loop {
        // The lock is released before the wait.
        let wait = sites().next_report(Instant::now());
        let Some(wait) = wait else { return };
        std::thread::sleep(wait);
        report(PERIOD);
    }
}

/// Reports the lines of the periods that began at least this long ago.
fn report(age: Duration) {
    // Its lock is released before a line is written, which takes it.
    let due = sites().take_due(Instant::now(), age);
    for Site { at, left_out, .. } in due {
        tracing::warn!(at, left_out, "lines were left out: more than {LINES} in a minute");
    }
}

fn sites() -> MutexGuard<'static, Sites> {
    // No code panics while it holds the lock.
    SITES.lock().even_poisoned()
}

/// The call sites that have written lines.
struct Sites {
    all: Vec<Site>,
    /// Whether a thread reports what is left out.
    reported: bool,
}

/// A call site and its last period, which begins with a line.
#[derive(Clone)]
struct Site {
    id: Identifier,
    /// The file and the line.
    at: String,
    since: Instant,
    lines: u32,
    left_out: u64,
}

impl Sites {
    /// Counts a line. Returns whether it is written.
    fn allow(&mut self, line: &Metadata<'_>, now: Instant) -> bool {
        let id = line.callsite();
        let site = match self.all.iter().position(|site| site.id == id) {
            Some(known) => &mut self.all[known],
            None => {
                let at = format!("{}:{}", line.file().unwrap_or_default(), line.line().unwrap_or_default());
                self.all.push(Site { id, at, since: now, lines: 0, left_out: 0 });
                let last = self.all.len() - 1;
                &mut self.all[last]
            }
        };
        // What was left out is reported before the next period begins.
        if now.saturating_duration_since(site.since) >= PERIOD && site.left_out == 0 {
            (site.since, site.lines) = (now, 0);
        }
        let allowed = site.lines < LINES;
        if allowed {
            site.lines += 1;
        } else {
            site.left_out += 1;
        }
        allowed
    }

    /// How long the thread that reports should wait; `None` if nothing was left out, and it ends.
    fn next_report(&mut self, now: Instant) -> Option<Duration> {
        let waiting = self.all.iter().filter(|site| site.left_out > 0);
        let due = waiting.map(|site| site.since + PERIOD).min();
        self.reported = due.is_some();
        due.map(|due| due.saturating_duration_since(now))
    }

    /// The call sites with lines that were left out in a period that began at least this long ago. Their next
    /// periods begin.
    fn take_due(&mut self, now: Instant, age: Duration) -> Vec<Site> {
        let due = |site: &&mut Site| site.left_out > 0 && now.saturating_duration_since(site.since) >= age;
        let mut taken = Vec::new();
        for site in self.all.iter_mut().filter(due) {
            taken.push(site.clone());
            (site.since, site.lines, site.left_out) = (now, 0, 0);
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use tracing::Callsite as _;
    use tracing::callsite::DefaultCallsite;
    use tracing::metadata::Kind;

    use super::*;

    /// A call site of a warning.
    macro_rules! warning {
        () => {{
            static SITE: DefaultCallsite = DefaultCallsite::new(&LINE);
            static LINE: Metadata<'static> = tracing::metadata! {
                name: "warning", target: "tests", level: Level::WARN, fields: &["message"],
                callsite: &SITE, kind: Kind::EVENT
            };
            SITE.metadata()
        }};
    }

    fn written(sites: &mut Sites, line: &Metadata<'_>, now: Instant, times: usize) -> usize {
        (0..times).filter(|_| sites.allow(line, now)).count()
    }

    #[test]
    fn each_call_site_writes_so_many_lines_in_a_minute_and_then_how_many_were_left_out() {
        let mut sites = Sites { all: Vec::new(), reported: false };
        let (one, other, start) = (warning!(), warning!(), Instant::now());
        let limit = LINES as usize;
        assert_eq!(written(&mut sites, one, start, limit), limit);
        assert_eq!(sites.next_report(start), None);
        assert_eq!(written(&mut sites, one, start, 1000), 0);
        assert_eq!(written(&mut sites, other, start, 1), 1);
        let late = start + PERIOD - Duration::from_secs(1);
        assert_eq!(sites.next_report(late), Some(Duration::from_secs(1)));
        assert!(sites.take_due(late, PERIOD).is_empty());

        let next = start + PERIOD;
        let left_out: Vec<u64> = sites.take_due(next, PERIOD).iter().map(|site| site.left_out).collect();
        assert_eq!(left_out, [1000]);
        assert_eq!(sites.next_report(next), None);
        assert_eq!(written(&mut sites, one, next, 1000), limit);
        assert_eq!(sites.take_due(next, Duration::ZERO)[0].left_out, 1000 - u64::from(LINES));
    }

    #[test]
    fn lines_that_come_slowly_are_never_left_out() {
        let mut sites = Sites { all: Vec::new(), reported: false };
        let (line, start) = (warning!(), Instant::now());
        for minute in 0..100 {
            assert_eq!(written(&mut sites, line, start + minute * PERIOD, 15), 15);
        }
    }
}
