#!/usr/bin/env bash
# Posts .github/ci-labels.md on pull request $NUMBER, or brings the comment that is there up to date.
# Needs gh and GH_TOKEN (pull-requests: write).
set -euo pipefail

body=.github/ci-labels.md
comments=repos/$GITHUB_REPOSITORY/issues

posted=$(gh api --paginate "$comments/$NUMBER/comments" \
  --jq '.[] | select(.user.login == "github-actions[bot]" and (.body | startswith("<!-- ci-labels -->"))) | .id')
if [[ -n $posted ]]; then
  gh api --silent --method PATCH "$comments/comments/${posted%%$'\n'*}" --field "body=@$body"
else
  gh api --silent --method POST "$comments/$NUMBER/comments" --field "body=@$body"
fi
