//! Servers that are killed while they train continue to the bytes of one run.

use std::fs;
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use super::site::{MODEL, PARTS, Site, shows};
use crate::program::{check_listed_versions, kills};
use crate::switching::wait;
use crate::train_resume::continuing;

/// Kills of each kind of run.
const KILLS: usize = 4;

/// Kills servers with these flags at random instants. The last one trains to the end, and its version must be
/// that of `train` with the flags `data`.
fn continues_after_kills(site: &Site, source: &str, data: &str, more: &str) {
    let model = Path::new(&site.workshop.models).join(MODEL);
    let more_and_every = format!("--publish-every 3steps {more}");
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let (mut killed, mut missed) = (0, 0_usize);
    while killed < kills(KILLS) {
        // In turn also before it serves: while the first version is written, or the last one is opened.
        let served = match killed % 2 {
            0 => site.serve(source, &more_and_every),
            _ => site.listen(source, &more_and_every),
        };
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        // On a fast machine training soon ends, so the next kill comes earlier.
        sleep(Duration::from_millis(random % (400 / (1 + missed as u64))));
        let ended = shows(&served, "training_state", 0.0);
        // Kills it.
        drop(served);
        check_listed_versions(&site.workshop.models, MODEL);
        if ended {
            missed += 1;
            assert!(missed <= 20 + kills(KILLS), "{missed} kills after the end of training, {killed} before");
            fs::remove_dir_all(&model).unwrap();
        } else {
            killed += 1;
        }
    }
    // The last version is good, because all that are listed are.
    let continuing = continuing(&site.workshop.models, MODEL);
    let served = site.serve(source, &more_and_every);
    wait("training ends", || shows(&served, "training_state", 0.0));
    if let Some(words) = continuing {
        wait("training says that it continues", || words.iter().any(|words| served.log().contains(words)));
    }
    drop(served);
    site.compare_with_train(data, more);
    fs::remove_dir_all(&model).unwrap();
}

/// Servers that follow a directory are killed, and continue to the bytes of one run.
fn follows_after_kills(more: &str) {
    let site = Site::new(1600);
    (0..PARTS).for_each(|part| site.arrive(part));
    let followed = format!("--follow {}", site.incoming);
    let more = format!("--follow-until {} {more}", PARTS - 1);
    continues_after_kills(&site, &site.incoming, &followed, &more);
}

#[test]
fn a_server_that_is_killed_while_it_trains_continues_to_the_same_bytes() {
    follows_after_kills("");
}

#[test]
fn a_server_with_a_scratchpad_that_is_killed_while_it_trains_continues_to_the_same_bytes() {
    follows_after_kills("--scratchpad 0.3");
}

/// Servers that train on a file are killed, and continue to the bytes of one run.
fn trains_a_file_after_kills(more: &str) {
    let site = Site::new(800);
    let file = &site.workshop.train;
    continues_after_kills(&site, file, &format!("--data {file}"), more);
}

#[test]
fn a_server_that_is_killed_in_shuffled_epochs_continues_to_the_same_bytes() {
    trains_a_file_after_kills("--epochs 2 --shuffle 300 --data-seed 5");
}

#[test]
fn a_server_with_a_scratchpad_that_is_killed_in_shuffled_epochs_continues_to_the_same_bytes() {
    trains_a_file_after_kills("--epochs 2 --shuffle 300 --scratchpad 0.3");
}
