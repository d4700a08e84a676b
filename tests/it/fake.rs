//! A model whose scores a test can compute.

// White-box tests share this file, and each of the two programs uses a part.
#![allow(dead_code)]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use flechette::config::BatcherConfig;
use flechette::predict::{Description, Predict, PredictError};
use flechette::schema::Schema;
use flechette::types::{AbsentId, Batch, Scores, Times, Version};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// A dense value that makes the model panic, and one that makes it fail.
pub(crate) const PANIC: f32 = 666.0;
pub(crate) const FAIL: f32 = 13.0;

/// A model whose score is a hash of the sample's values, so that a mixed-up sample gets a wrong score.
pub(crate) struct Fake {
    pub schema: Arc<Schema>,
    pub version: AtomicU64,
    pub ready: AtomicBool,
    /// How long each sample takes, in microseconds.
    pub sample_us: AtomicU64,
    /// The number of samples of every successful call.
    pub calls: Mutex<Vec<usize>>,
    /// The number of calls that have begun, and whether calls may continue.
    door: Mutex<(usize, bool)>,
    opened: Condvar,
}

impl Fake {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            schema: Arc::new(schema()),
            version: AtomicU64::new(7),
            ready: AtomicBool::new(true),
            sample_us: AtomicU64::new(0),
            calls: Mutex::default(),
            door: Mutex::new((0, true)),
            opened: Condvar::new(),
        })
    }

    /// Makes calls block after they have begun, until [`Self::release`].
    pub(crate) fn hold(&self) {
        self.door.lock().unwrap().1 = false;
    }

    pub(crate) fn release(&self) {
        self.door.lock().unwrap().1 = true;
        self.opened.notify_all();
    }

    pub(crate) fn begun(&self) -> usize {
        self.door.lock().unwrap().0
    }

    pub(crate) fn computed(&self) -> usize {
        self.calls.lock().unwrap().iter().sum()
    }
}

pub(crate) fn score(dense: &[f32], ids: &[&[u64]]) -> f32 {
    let mut bytes = Vec::new();
    for value in dense {
        bytes.extend(value.to_bits().to_le_bytes());
    }
    for ids in ids {
        bytes.push(ids.len() as u8);
        bytes.extend(ids.iter().flat_map(|id| id.to_le_bytes()));
    }
    (xxh3_64_with_seed(&bytes, 1) % (1 << 24)) as f32 / (1u32 << 24) as f32
}

/// The logit that the model returns beside a score.
pub(crate) fn logit(score: f32) -> f32 {
    8.0 * score - 5.0
}

impl Predict for Fake {
    fn predict(&self, batch: &Batch) -> Result<Scores, PredictError> {
        let begun = Instant::now();
        let mut door = self.door.lock().unwrap();
        door.0 += 1;
        while !door.1 {
            door = self.opened.wait(door).unwrap();
        }
        drop(door);
        let sample_us = self.sample_us.load(Ordering::SeqCst);
        std::thread::sleep(Duration::from_micros(sample_us * batch.samples as u64));
        let width = self.schema.dense_width();
        let mut scores = Scores {
            version: Version(self.version.load(Ordering::SeqCst)),
            probabilities: Vec::new(),
            logits: Vec::new(),
            absent: Vec::new(),
            // A test that holds the model stands for slow lookups.
            times: Times { lookup: begun.elapsed(), ..Times::default() },
        };
        for sample in 0..batch.samples {
            let dense = &batch.dense[sample * width..][..width];
            assert!(dense[0] != PANIC, "sample {sample} makes the model panic");
            if dense[0] == FAIL {
                return Err(PredictError::Store("disk gone".to_owned()));
            }
            let ids: Vec<&[u64]> = batch.features.iter().map(|f| f.sample(sample)).collect();
            scores.probabilities.push(score(dense, &ids));
            for (feature, table) in self.schema.tables.iter().enumerate() {
                let absent = ids[feature].iter().filter(|id| **id >= table.rows);
                let (sample, feature) = (sample as u32, feature as u32);
                scores.absent.extend(absent.map(|_| AbsentId { sample, feature }));
            }
        }
        if batch.logits {
            scores.logits.extend(scores.probabilities.iter().map(|score| logit(*score)));
        }
        self.calls.lock().unwrap().push(batch.samples);
        Ok(scores)
    }

    fn describe(&self) -> Description {
        Description {
            model: "ads".to_owned(),
            version: Version(self.version.load(Ordering::SeqCst)),
            schema: self.schema.clone(),
            max_samples: 4096,
        }
    }

    fn ready(&self) -> bool {
        self.ready.load(Ordering::SeqCst)
    }
}

/// `user`: one-hot, ids or strings. `tags`: up to 3 ids. `strict`: one-hot, refuses absent ids.
/// Table `i` belongs to feature `i`.
const INPUTS: &str = r#"
    [[dense]]
    name = "price"
    [[dense]]
    name = "age"
    transform = "log1p"
    [[features]]
    name = "user"
    table = "users"
    hash = { seed = 3, modulus = 1000 }
    [[features]]
    name = "tag"
    table = "tags"
    arity = { multi_hot = { max = 3 } }
    [[features]]
    name = "strict"
    table = "stricts"
    hash = { seed = 4, modulus = 10 }
    [[tables]]
    name = "users"
    rows = 1000
    dim = 4
    [[tables]]
    name = "tags"
    rows = 50
    dim = 4
    default = { row = 0 }
    [[tables]]
    name = "stricts"
    rows = 10
    dim = 4
    default = "error"
"#;

fn schema() -> Schema {
    Schema::parse(&format!("[architecture]\nkind = \"dlrm\"\nbottom = [8]\ntop = [8]\n{INPUTS}")).unwrap()
}

/// The same inputs for a network that multiplies them, so that huge values overflow.
pub(crate) fn crossed_schema() -> Schema {
    Schema::parse(&format!("[architecture]\nkind = \"dcn\"\ncross_layers = 3\ndeep = [8]\n{INPUTS}")).unwrap()
}

/// Far above what anything takes.
pub(crate) const LIMIT: Duration = Duration::from_secs(300);

/// Waits for a condition. Panics if it does not hold after a long time.
pub(crate) async fn until(happened: impl AsyncFn() -> bool) {
    let begun = Instant::now();
    while !happened().await {
        assert!(begun.elapsed() < LIMIT, "the condition never held");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

pub(crate) fn batcher_config() -> BatcherConfig {
    BatcherConfig {
        max_samples: 256,
        max_delay: Duration::ZERO,
        queue_samples: 4096,
        queue_bytes: 16 << 20,
        workers: 1,
        default_deadline: Duration::from_secs(10),
    }
}
