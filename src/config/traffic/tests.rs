use super::super::{Config, ConfigError, Flags};
use super::*;

fn config(file: &str) -> Result<Config, ConfigError> {
    Config::resolve(&Flags::default(), [], Some(file))
}

fn traffic(table: &str) -> TrafficConfig {
    config(&format!("[models.ads]\n{table}")).unwrap().traffic.remove("ads").unwrap()
}

fn refusal(table: &str) -> String {
    config(&format!("[models.ads]\n{table}")).unwrap_err().to_string()
}

fn given(numbers: &[u64]) -> VersionPolicy {
    VersionPolicy::Given(numbers.iter().copied().map(Version).collect())
}

#[test]
fn a_model_without_a_table_has_the_latest_version_and_no_canary() {
    assert!(config("[models.ads]\nbatcher.workers = 1").unwrap().traffic.is_empty());
    assert_eq!(traffic("canary_share = 0"), TrafficConfig::default());
}

#[test]
fn a_policy_is_a_text_or_a_list() {
    let policy = |value: &str| traffic(&format!("versions = {value}")).versions;
    assert_eq!(policy("\"latest\""), VersionPolicy::Latest(1));
    assert_eq!(policy("\"latest 3\""), VersionPolicy::Latest(3));
    assert_eq!(policy("\"all\""), VersionPolicy::Latest(MAX_VERSIONS));
    assert_eq!(policy("[3, 5]"), given(&[3, 5]));
    assert_eq!(policy("\"5, 3\""), given(&[3, 5]));
    assert_eq!(policy("7"), given(&[7]));
    for wrong in ["\"\"", "\"latest 0\"", "\"latest 33\"", "\"newest\"", "[1, -2]", "1.5", "[]"] {
        let text = refusal(&format!("versions = {wrong}"));
        assert!(text.starts_with("models.ads.versions (file :2): expected latest, latest N, all"), "{text}");
    }
}

#[test]
fn labels_are_a_table_or_a_text() {
    let expected: BTreeMap<String, VersionSelector> = [
        ("canary".to_owned(), VersionSelector::Latest),
        ("stable".to_owned(), VersionSelector::Version(Version(3))),
    ]
    .into();
    assert_eq!(traffic("labels = { stable = 3, canary = \"latest\" }").labels, expected);
    assert_eq!(traffic("labels = \"stable = 3, canary=latest\"").labels, expected);
    assert_eq!(traffic("[models.ads.labels]\nstable = 3\ncanary = \"latest\"").labels, expected);
    let many = (0..=MAX_LABELS).map(|i| format!("l{i} = 1")).collect::<Vec<_>>().join(", ");
    let long = "x".repeat(33);
    for wrong in
        ["Stable = 1", "latest = 1", "7 = 1", "a = b", "a", "a = 1, a = 2", &many, &format!("{long} = 1")]
    {
        let text = refusal(&format!("labels = \"{wrong}\""));
        assert!(text.contains("expected LABEL = VERSION"), "{text}");
    }
}

#[test]
fn shares_sticky_keys_and_shadows_are_checked() {
    let table =
        traffic("canary_share = 0.25\nsticky = \"feature:user\"\nshadow = \"canary\"\nshadow_share = 1");
    assert_eq!((table.canary_share, table.shadow_share), (0.25, 1.0));
    assert_eq!(table.sticky, Sticky::Feature("user".to_owned()));
    assert_eq!(table.shadow, Some(Shadow::Label("canary".to_owned())));
    assert_eq!(traffic("shadow = 4").shadow, Some(Shadow::Target(VersionSelector::Version(Version(4)))));
    assert!(refusal("canary_share = 1.5").contains("expected a number from 0 to 1, got \"1.5\""));
    assert!(refusal("sticky = \"user\"").contains("expected request_id, or feature:NAME"));
    assert!(refusal("shadow = \"A\"").contains("expected a number, latest, or a label"));
}

#[test]
fn an_unknown_key_of_a_model_is_an_error_with_the_nearest_one() {
    for (table, error) in [
        (
            "canary_shar = 1",
            "file :2: unknown key models.ads.canary_shar; did you mean models.ads.canary_share?",
        ),
        (
            "[models.ads.label]\nstable = 1",
            "file :2: unknown section models.ads.label; did you mean models.ads.labels?",
        ),
        (
            "[models.ads.batcher]\nversions = 3",
            "file :3: unknown key models.ads.batcher.versions; did you mean models.ads.batcher.workers?",
        ),
        (
            "versions = true",
            "models.ads.versions (file :2): expected a string or a number, or a list or table of them, got \
             boolean",
        ),
        ("canary_share = [1]", "models.ads.canary_share (file :2): expected a string or a number, got array"),
    ] {
        assert_eq!(refusal(table), error);
    }
}

#[test]
fn the_environment_has_the_settings_of_models_too() {
    let with = |variable, text: &str| {
        let environment = [(format!("FLECHETTE_MODELS_{variable}").into(), text.into())];
        Config::resolve(&Flags::default(), environment, Some("[models.ads]\nversions = 7"))
    };
    let of =
        |config: Result<Config, ConfigError>, model: &str| config.unwrap().traffic.remove(model).unwrap();
    assert_eq!(of(with("ads_VERSIONS", "3, 5"), "ads").versions, given(&[3, 5]));
    assert_eq!(of(with("my_ads_SHADOW_SHARE", "0.5"), "my_ads").shadow_share, 0.5);
    let labels = of(with("ads_LABELS", "stable=3"), "ads").labels;
    assert_eq!(labels, [("stable".to_owned(), VersionSelector::Version(Version(3)))].into());
    assert_eq!(
        with("my_ads_CANARY_SHAR", "1").unwrap_err().to_string(),
        "environment: unknown variable FLECHETTE_MODELS_my_ads_CANARY_SHAR; did you mean \
         FLECHETTE_MODELS_my_ads_CANARY_SHARE?"
    );
}

#[test]
fn a_model_called_name_sets_nothing_for_other_models() {
    let file = "[models.NAME]\nversions = 3\n[models.ads]\ncanary_share = 0.5\n";
    assert_eq!(config(file).unwrap().traffic["ads"].versions, VersionPolicy::Latest(1));
}
