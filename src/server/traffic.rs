//! How requests are shared out among the loaded versions of a model: labels, and a share for the canary.
//!
//! A request without a version and a label has a key: its id, or the ids of a feature. The key is hashed to a
//! number from 0 to 1, and the canary gets the keys below its share. So a user stays on one side, and a
//! larger share only adds users to the canary. Requests without a key are numbered, and the number is the
//! key.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::batcher::Terms;
use crate::config::{MAX_LABELS, STABLE, Sticky};
use crate::schema::Schema;
use crate::types::{Batch, Version, VersionSelector};

/// Why a client cannot set or remove a label.
#[allow(missing_docs)] // the error texts document the variants
#[derive(Debug, thiserror::Error)]
pub(crate) enum LabelError {
    #[error("the model has {MAX_LABELS} labels, which is the limit")]
    TooMany,
    #[error("no label {label}; its labels are: {labels}")]
    Unknown { label: String, labels: String },
}

/// What a label shall name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LabelChange<'l> {
    pub label: &'l str,
    /// `None`: forget what clients have set.
    pub target: Option<VersionSelector>,
}

/// The labels of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Labels {
    /// Those of the settings.
    pub settings: BTreeMap<String, VersionSelector>,
    /// Those that clients have set, which win.
    pub set: BTreeMap<String, VersionSelector>,
}

/// The targets of a label: as a client has set it, which is used, and as the settings have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LabelTargets {
    pub set: VersionSelector,
    pub settings: VersionSelector,
}

impl Labels {
    /// All labels. `stable` is always one of them.
    pub(crate) fn all(&self) -> BTreeMap<String, VersionSelector> {
        let mut all = self.settings.clone();
        all.entry(STABLE.to_owned()).or_insert(VersionSelector::Latest);
        all.extend(self.set.iter().map(|(label, target)| (label.clone(), *target)));
        all
    }

    /// The labels of the settings that name something else than what a client has set.
    pub(crate) fn overridden(&self) -> impl Iterator<Item = (String, LabelTargets)> {
        self.settings.iter().filter_map(|(label, &settings)| {
            let set = *self.set.get(label).filter(|set| **set != settings)?;
            Some((label.clone(), LabelTargets { set, settings }))
        })
    }

    /// What `stable` names.
    pub(crate) fn stable(&self) -> VersionSelector {
        self.set.get(STABLE).or_else(|| self.settings.get(STABLE)).copied().unwrap_or(VersionSelector::Latest)
    }

    /// Sets a label, or forgets it.
    #[must_use]
    pub(crate) fn with(&self, LabelChange { label, target }: LabelChange<'_>) -> Self {
        let mut labels = self.clone();
        match target {
            Some(target) => labels.set.insert(label.to_owned(), target),
            None => labels.set.remove(label),
        };
        labels
    }

    /// As [`Self::with`], for a client.
    ///
    /// # Errors
    /// [`LabelError`].
    pub(crate) fn changed(&self, change: LabelChange<'_>) -> Result<Self, LabelError> {
        let (before, labels) = (self.all(), self.with(change));
        let LabelChange { label, target } = change;
        // A mistyped name must not look like a label that is gone, whose requests would go on.
        if target.is_none() && !before.contains_key(label) {
            let labels = before.into_keys().collect::<Vec<_>>().join(", ");
            return Err(LabelError::Unknown { label: label.to_owned(), labels });
        }
        let count = labels.all().len();
        // The settings may give as many labels besides `stable`. A roll-back must work then too.
        if count > MAX_LABELS && count > before.len() {
            return Err(LabelError::TooMany);
        }
        Ok(labels)
    }
}

/// What a request asks for, besides its samples.
#[derive(Debug, Default)]
pub(crate) struct RequestOptions<'a> {
    /// The version that must compute the scores.
    pub version: Option<Version>,
    /// The label whose version must compute them. Empty: none.
    pub label: String,
    /// The request's own id. Empty: none.
    pub id: &'a str,
    pub terms: Terms,
    pub logits: bool,
}

/// Keeps the requests of one user on one side.
pub(crate) struct Split {
    share: f64,
    /// The feature whose ids are the key; `None`: the request's id is the key.
    feature: Option<usize>,
    seed: u64,
}

/// The number of the next request without a key. It is not part of a [`Split`], which is made anew with each
/// version: numbers that began again would give the first requests of each version to the same side.
static NEXT: AtomicU64 = AtomicU64::new(0);

impl Split {
    /// `salt` makes the splits of two models independent.
    pub(crate) fn new(share: f64, sticky: &Sticky, schema: &Schema, salt: &str) -> Self {
        let feature = match sticky {
            Sticky::RequestId => None,
            Sticky::Feature(name) => schema.features.iter().position(|feature| feature.name == *name),
        };
        Self { share, feature, seed: xxh3_64(salt.as_bytes()) }
    }

    /// Whether the samples of a request decide.
    pub(crate) fn by_samples(&self) -> bool {
        self.feature.is_some()
    }

    /// Whether the share gets a request with this id.
    pub(crate) fn takes(&self, id: &str) -> bool {
        if id.is_empty() { self.takes_next() } else { self.takes_key(id.as_bytes()) }
    }

    /// Whether the share gets a request with these samples.
    pub(crate) fn takes_batch(&self, batch: &Batch) -> bool {
        let column = self.feature.and_then(|feature| batch.features.get(feature));
        let ids = column.filter(|_| batch.samples > 0).map_or(&[][..], |column| column.sample(0));
        if ids.is_empty() {
            return self.takes_next();
        }
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        self.takes_key(&bytes)
    }

    /// Whether the share gets the next request without a key.
    pub(crate) fn takes_next(&self) -> bool {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        self.takes_key(&number.to_le_bytes())
    }

    fn takes_key(&self, key: &[u8]) -> bool {
        // 53 bits, so that the number is below 1.
        let place = (xxh3_64_with_seed(key, self.seed) >> 11) as f64 / (1u64 << 53) as f64;
        place < self.share
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests {
    use super::*;

    fn split(share: f64, sticky: &Sticky) -> Split {
        let schema = crate::schema::preset::criteo(crate::schema::preset::ArchKind::Dlrm, 4, 100);
        Split::new(share, sticky, &schema, "ads")
    }

    #[test]
    fn requests_without_a_key_are_not_numbered_anew_with_each_version() {
        // Each split sees a single request.
        let taken = (0..10_000).filter(|_| split(0.2, &Sticky::RequestId).takes("")).count();
        assert!((1_700..2_300).contains(&taken), "{taken}");
    }

    #[test]
    fn a_share_of_the_ids_is_taken_and_a_larger_share_adds_ids() {
        let ids: Vec<String> = (0..10_000).map(|user| format!("user-{user}")).collect();
        let taken = |share| {
            let split = split(share, &Sticky::RequestId);
            ids.iter().filter(|id| split.takes(id)).cloned().collect::<Vec<_>>()
        };
        let (fifth, half) = (taken(0.2), taken(0.5));
        // Five standard deviations.
        assert!(fifth.len().abs_diff(2000) < 200 && half.len().abs_diff(5000) < 250);
        assert!(fifth.iter().all(|id| half.contains(id)));
        assert_eq!(fifth, taken(0.2));
        assert!(taken(0.0).is_empty() && taken(1.0).len() == ids.len());
    }

    #[test]
    fn requests_without_a_key_are_shared_out_too() {
        let split = split(0.2, &Sticky::RequestId);
        let taken = (0..10_000).filter(|_| split.takes("")).count();
        assert!(taken.abs_diff(2000) < 200, "{taken}");
    }

    #[test]
    fn the_first_samples_ids_of_a_feature_decide() {
        let split = split(0.5, &Sticky::Feature("C3".to_owned()));
        assert!(split.by_samples());
        let batch = |id: u64, other: u64| {
            let mut batch = Batch::empty(26);
            batch.samples = 2;
            for (feature, column) in batch.features.iter_mut().enumerate() {
                column.ids = vec![if feature == 2 { id } else { other }, other];
                column.offsets = vec![0, 1, 2];
            }
            batch
        };
        let taken = |other| (0..1000).map(|id| split.takes_batch(&batch(id, other))).collect::<Vec<_>>();
        assert_eq!(taken(1), taken(2));
        assert!(taken(1).iter().filter(|taken| **taken).count().abs_diff(500) < 100);
    }
}
