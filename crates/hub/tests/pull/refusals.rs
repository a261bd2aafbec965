//! Tokens, and what the hub or this program refuses.

use std::{collections::BTreeMap, path::Path};

use powerinfer_artifact::progress::Silent;
use powerinfer_hub::{Hub, HubError, Settings, Token};

use crate::{MODEL, TestHub, name};

#[test]
fn only_the_hub_gets_the_token() {
    let mut test = TestHub::behaving(|server| server.token = Some("hf_secret".to_owned()));
    test.refused(&["no public model `org/tiny`", "set `HF_TOKEN`"]);
    test.settings.token = Token::new("hf_other");
    test.refused(&["no public model `org/tiny`", "account of the token"]);
    test.settings.token = Token::new("hf_secret");
    test.pull().unwrap();
    let requests = test.server.log().into_iter().skip(2);
    let (storage, hub): (Vec<_>, Vec<_>) = requests.partition(|request| request.storage);
    assert!(hub.len() > 4 && storage.len() == 1, "{hub:?}");
    let token = Some("Bearer hf_secret");
    assert!(hub.iter().all(|one| one.authorization.as_deref() == token));
    assert!(storage.iter().all(|one| one.authorization.is_none()));
    // Nobody else lists the hub's models.
    test.behave(|server| server.redirects_listing = true);
    test.refused(&["HTTP 302"]);
}

#[test]
fn refusals_of_the_hub_have_different_errors() {
    let test = TestHub::behaving(|server| server.gated = true);
    let terms = format!("accept its terms at {}/org/tiny", test.server.endpoint);
    test.refused(&["org/tiny", "not in the authorized list", "HF_TOKEN", &terms]);
    test.behave(|_| {});
    let unknown = test.pull_named("org/other").unwrap_err();
    assert!(matches!(unknown, HubError::NoSuchModel { .. }), "{unknown}");
    let revision = test.pull_named("org/tiny@v9").unwrap_err();
    assert!(
        matches!(&revision, HubError::NoSuchRevision { revision, .. } if revision == "v9"),
        "{revision}"
    );
}

#[test]
fn hostile_names_are_refused() {
    for file in [
        "../../../evil.gguf",
        "/evil.gguf",
        "a\\..\\evil.gguf",
        "C:evil.gguf",
    ] {
        let test = TestHub::new(BTreeMap::new());
        test.behave(|server| server.also_listed = vec![file.to_owned()]);
        test.refused(&["evil.gguf", "refusing"]);
    }
    // Files that nobody needs do not matter.
    let test = TestHub::behaving(|server| server.also_listed = vec!["../../../evil".to_owned()]);
    test.pull().unwrap();
    for (etag, commit) in [
        (Some("../../../evil"), None),
        (Some(""), None),
        (None, Some("../../../evil")),
        (None, Some("0123")),
    ] {
        let test = TestHub::behaving(|server| {
            server.etag = etag.map(str::to_owned);
            server.commit = commit.map(str::to_owned);
        });
        test.refused(&["cannot be used"]);
        assert!(!test.cache.path().join("../evil").exists());
    }
}

#[test]
fn invalid_addresses_are_errors() {
    for endpoint in ["huggingface.co", "ftp://huggingface.co", ""] {
        let settings = Settings::new(endpoint, Path::new("unused"));
        let error = Hub::new(settings).pull(&name(MODEL), &Silent).unwrap_err();
        assert!(matches!(error, HubError::BadAddress { .. }), "{error}");
    }
}
