//! `flechette label`: shows the loaded versions and the labels of a served model, or sets a label.

use anyhow::anyhow;
use serde_json::{Map, Value, json};

use crate::cli::client::{ANSWER_BYTES, CHANGE_TIMEOUT, Connect, DESCRIBE_TIMEOUT, call, whole};
use crate::cli::runtime::on_this_thread;
use crate::cli::{InputError, note, print};
use crate::server::proto::ctr_client::CtrClient;
use crate::server::proto::{GetModelRequest, GetModelResponse, Label, SetLabelRequest, SetLabelResponse};
use crate::types::{Version, VersionSelector};

/// The version that removes a label.
const NONE: &str = "none";

/// Flags of `label`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    server: Connect,
    /// Name of the model
    #[arg(value_name = "MODEL")]
    model: String,
    /// The label to set, such as stable or canary; without it, the labels are listed
    #[arg(value_name = "LABEL", requires = "version")]
    label: Option<String>,
    /// The number of a version, latest, or none to remove the label
    #[arg(value_name = "VERSION")]
    version: Option<String>,
    /// Prints one line of JSON: the labels, and without LABEL also the loaded versions
    #[arg(long)]
    json: bool,
}

/// Lists the labels, or sets one.
///
/// # Errors
/// When the server cannot be reached, or refuses the label or the version.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    print(&on_this_thread(ask(args))??)
}

async fn ask(args: Args) -> anyhow::Result<String> {
    let Args { server, model, label, version, json } = args;
    let change = label.zip(version).map(|(label, version)| request(&model, label, &version)).transpose()?;
    let token = server.token()?;
    let mut ctr = CtrClient::new(server.channel().await?).max_decoding_message_size(ANSWER_BYTES);
    let failed = |status| server.failed_call(status);
    // A token for changes may not be one for GetModel.
    Ok(match change {
        None => {
            let request = call(GetModelRequest { model }, DESCRIBE_TIMEOUT, token.as_ref());
            let answer = whole(DESCRIBE_TIMEOUT, ctr.get_model(request)).await;
            let model = answer.map_err(failed)?.into_inner();
            if json { listed_json(&model) } else { listed(&model) }
        }
        Some(change) => {
            let SetLabelRequest { label, remove, .. } = change.clone();
            let answer =
                whole(CHANGE_TIMEOUT, ctr.set_label(call(change, CHANGE_TIMEOUT, token.as_ref()))).await;
            let SetLabelResponse { version, not_kept, latest } = answer.map_err(failed)?.into_inner();
            if !not_kept.is_empty() {
                note(&format!("warning: the change is lost at a restart of the server: {not_kept}"));
            }
            let removed = remove && version == 0;
            let set = Label { label, version, latest };
            match (json, removed) {
                (true, true) => format!("{}\n", json!({"labels": {set.label: null}})),
                (true, false) => format!("{}\n", json!({"labels": labels_json(&[set])})),
                (false, true) => format!("{}: removed\n", set.label),
                (false, false) => line(&set),
            }
        }
    })
}

fn request(model: &str, label: String, version: &str) -> Result<SetLabelRequest, InputError> {
    let (version, remove) = match (version, VersionSelector::parse(version)) {
        (NONE, _) => (0, true),
        (_, Some(VersionSelector::Latest)) => (0, false),
        (_, Some(VersionSelector::Version(Version(number)))) if number > 0 => (number, false),
        _ => {
            let expected = "the number of a version, latest or none";
            return Err(InputError(anyhow!("VERSION: expected {expected}, got {version:?}")));
        }
    };
    Ok(SetLabelRequest { model: model.to_owned(), label, version, remove })
}

/// The labels, one a line, and the loaded versions.
fn listed(model: &GetModelResponse) -> String {
    let labels: String = model.labels.iter().map(line).collect();
    let versions: Vec<String> = model.versions.iter().map(u64::to_string).collect();
    format!("{labels}loaded: {}\n", versions.join(", "))
}

fn listed_json(model: &GetModelResponse) -> String {
    format!("{}\n", json!({"labels": labels_json(&model.labels), "loaded": model.versions}))
}

/// The version of each label, null if it is not loaded, and whether the label follows the latest one.
fn labels_json(labels: &[Label]) -> Map<String, Value> {
    let one = |Label { label, version, latest }: &Label| {
        let version = Some(version).filter(|version| **version > 0);
        (label.clone(), json!({"version": version, "latest": latest}))
    };
    labels.iter().map(one).collect()
}

fn line(label: &Label) -> String {
    let version = match (label.version, label.latest) {
        (0, _) => "not loaded".to_owned(),
        (version, true) => format!("{version} (latest)"),
        (version, false) => version.to_string(),
    };
    format!("{}: {version}\n", label.label)
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_a_number_latest_or_none() {
        let parsed = |text| request("m", "stable".to_owned(), text).map(|r| (r.version, r.remove));
        assert_eq!(parsed("3").unwrap(), (3, false));
        assert_eq!(parsed("latest").unwrap(), (0, false));
        assert_eq!(parsed("none").unwrap(), (0, true));
        for wrong in ["0", "-1", "newest", ""] {
            let text = parsed(wrong).unwrap_err().to_string();
            assert_eq!(
                text,
                format!("VERSION: expected the number of a version, latest or none, got {wrong:?}")
            );
        }
    }
}
