# Fast Sandbox. `make up` and `make test` do all the set-up that they need; `make help` lists the rest.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

BIN := $(CURDIR)/bin
TOOLS := $(BIN)/tools
VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
LDFLAGS := -s -w -X github.com/fast-sandbox/fast-sandbox/internal/daemon.version=$(VERSION)
# Everything but the race detector's tests is compiled in one way, so that builds, tests and the linter share their work.
export CGO_ENABLED := 0
export GOFLAGS := $(strip $(shell go env GOFLAGS) -trimpath)
# The state of the repository is in the version alone, so that a build does not depend on how it was fetched.
GO_BUILD := go build -buildvcs=false -ldflags "$(LDFLAGS)"
COMMITTED := $(shell TZ=UTC git log -1 --format=%cd --date=format-local:%Y-%m-%dT%H:%M:%SZ 2>/dev/null || echo 1970-01-01T00:00:00Z)
# Every step prints the time since the first make began.
export STARTED := $(or $(STARTED),$(shell date +%s))
STEP := .ci/step
KUBE_VERSION := v1.34.4
KUBE_LDFLAGS := -s -w -X k8s.io/component-base/version.gitVersion=$(KUBE_VERSION) -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=34
# Third-party protos come out of these modules.
PROTOVALIDATE := github.com/bufbuild/protovalidate@v1.2.2
GOOGLEAPIS := github.com/grpc-ecosystem/grpc-gateway@v1.16.0
PACKAGES = $(shell go list ./... | grep -v /gen/)
# The packages of fsb-local, except those that import Kubernetes itself: checking them means checking all of it.
LOCAL_PACKAGES = go list ./internal/... | grep -v -E '/internal/(kube|cmd)$$' | sed 's|.*/deploy/local|.|'

.PHONY: help
help: ## List the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z0-9-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

##### The local cluster

.PHONY: up trace down status env
up: ## Build everything, bring up a real local cluster, and run a first sandbox in it
	@$(MAKE) build
	@$(STEP) "starting the local cluster"
	@$(BIN)/fsb-local up --bin-dir $(BIN) --manifests deploy/overlays/local --began $(STARTED)
trace: ## As up, and run a trace store (Jaeger) beside the cluster: fsb-ctl trace NAME shows a sandbox's spans
	@$(MAKE) build jaeger
	@$(STEP) "starting the local cluster"
	@$(BIN)/fsb-local up --bin-dir $(BIN) --manifests deploy/overlays/local --trace --no-demo --began $(STARTED)
down: kube ## Remove the local cluster and all that it left on the machine, except its cache
	@$(BIN)/fsb-local down
status: ## Show the state of the local cluster
	@$(BIN)/fsb-local status
env: ## Print what a shell needs to use the cluster: eval "$$(make -s env)"
	@$(BIN)/fsb-local env

##### Building

.PHONY: build components binaries kube containerd jaeger sbom digests krew reproducible
build: deps ## Build everything into bin/
	@# All modules are downloaded at once, in the background; each build waits for its own.
	@.ci/modules . deploy/local deploy/local/containerd & $(MAKE) components NEXT=Kubernetes; \
		$(MAKE) kube NEXT=containerd; $(MAKE) containerd; wait $$!
components: deps
	@.ci/modules .
	@$(STEP) "building Fast Sandbox" "$(NEXT)"
	@$(MAKE) binaries
	@ln -sfn fsb-ctl $(BIN)/kubectl-fsb
	@ln -sfn fsb-ctl $(BIN)/kubectl_complete-fsb
binaries:
	@$(GO_BUILD) -o $(BIN)/ ./services/allocator ./services/controller ./services/gc ./agent/cmd/agent ./agent/cmd/containerd-shim-fsb-v1 ./agent/cmd/containerd-shim-fsb-member-v1 ./agent/cmd/sandbox-init ./agent/cmd/sandbox-helper ./janitor ./gateway
	@$(GO_BUILD) -o $(BIN)/fsb-ctl ./cli
kube: deps
	@.ci/modules deploy/local
	@$(STEP) "building Kubernetes $(KUBE_VERSION)$(if $(wildcard $(BIN)/fsb-local),, (some minutes the first time))" "$(NEXT)"
	@cd deploy/local && go build -ldflags "$(KUBE_LDFLAGS)" -o $(BIN)/fsb-local .
	@mkdir -p $(BIN)/k8s
	@for name in etcd kube-apiserver kube-controller-manager kubectl; do ln -sfn ../fsb-local $(BIN)/k8s/$$name; done
	@ln -sfn fsb-local $(BIN)/kubectl
containerd: deps
	@.ci/modules deploy/local/containerd
	@$(STEP) "building containerd" "$(NEXT)"
	@cd deploy/local/containerd && go build -o $(BIN)/containerd/ \
		-ldflags "-s -w -X github.com/containerd/containerd/v2/version.Version=$$(go list -m -f '{{.Version}}' github.com/containerd/containerd/v2)" \
		github.com/containerd/containerd/v2/cmd/containerd \
		github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2 \
		github.com/containerd/containerd/v2/cmd/ctr

# Jaeger has a module of its own, without its web page. Only `make trace` builds it.
jaeger: deps
	@.ci/modules deploy/local/jaeger
	@$(STEP) "building Jaeger"
	@cd deploy/local/jaeger && go build -ldflags "-s -w" -o $(BIN)/jaeger/ github.com/jaegertracing/jaeger/cmd/all-in-one

# A release: what it consists of, its images by their digests, and whether another build makes the same.
RELEASED := agent allocator containerd-shim-fsb-member-v1 containerd-shim-fsb-v1 controller fsb-ctl gateway gc janitor sandbox-helper sandbox-init
sbom: components kube ## Write what the binaries and images consist of into bin/sbom, as SPDX documents
	@.ci/modules internal/tools
	@$(BUILD_TOOL) ./sbom
	@mkdir -p $(BIN)/sbom
	@$(BIN)/fsb-local digests > $(BIN)/sbom/digests.json
	@$(TOOLS)/sbom -out $(BIN)/sbom -version $(VERSION) -created $(COMMITTED) -images deploy/images -digests $(BIN)/sbom/digests.json $(addprefix $(BIN)/,$(RELEASED))
digests: components kube ## Name the images of an overlay by their digests: make digests REGISTRY=registry.example/team OVERLAY=my-overlay
	@[ -n "$(REGISTRY)" ] && [ -n "$(OVERLAY)" ] || { echo "REGISTRY and OVERLAY are required" >&2; exit 1; }
	@mkdir -p $(OVERLAY)/images
	@$(BIN)/fsb-local digests --registry $(REGISTRY) > $(OVERLAY)/images/.kustomization.yaml
	@mv $(OVERLAY)/images/.kustomization.yaml $(OVERLAY)/images/kustomization.yaml
KREW := linux_amd64 linux_arm64 darwin_amd64 darwin_arm64
krew: deps ## Build the kubectl plugin for all platforms, and its krew manifest: make krew VERSION=v1.2.3 URI=https://example.org/v1.2.3
	@for platform in $(KREW); do \
		GOOS=$${platform%_*} GOARCH=$${platform#*_} $(GO_BUILD) -o $(BIN)/krew/$$platform/kubectl-fsb ./cli; \
	done
	@.ci/krew $(BIN)/krew "$(VERSION)" "$(URI)"
reproducible: kube ## Build binaries and images of the last commit twice, in two directories, and compare their digests
	@.ci/reproducible $(BIN)/fsb-local

.PHONY: deps
deps: ## Install what building and testing need and the machine lacks
	@./.ci/deps

##### Generating and checking

# grpcurl is for end-to-end tests: verify does not wait for it.
GRPCURL := github.com/fullstorydev/grpcurl/cmd/grpcurl
# Its parsers are in C.
VALE := github.com/vale-cli/vale/v3/cmd/vale
BUILD_TOOL := cd internal/tools && go build -ldflags "-s -w" -o $(TOOLS)/

.PHONY: tools grpcurl generate generate-only verify lint lint-only style style-only openapi format breaking vuln
tools: deps ## Build the generators and linters into bin/tools
	@.ci/modules internal/tools
	@$(STEP) "building the generators and linters" "$(NEXT)"
	@$(BUILD_TOOL) $$(go list tool | grep -v -e $(GRPCURL) -e $(VALE))
	@export CGO_ENABLED=1; $(BUILD_TOOL) $(VALE)
grpcurl: deps ## Build grpcurl into bin/tools
	@.ci/modules internal/tools
	@$(BUILD_TOOL) $(GRPCURL)
generate: tools generate-only ## Generate gen/, deploy/crd and the deep copies
generate-only:
	@mkdir -p .third_party/proto/buf/validate .third_party/proto/google/api
	@dir() { (cd "$$(mktemp -d)" && go mod download -json "$$1") | sed -n 's/^\t"Dir": "\(.*\)",$$/\1/p'; }; \
		install -m 0644 "$$(dir $(PROTOVALIDATE))"/proto/protovalidate/buf/validate/validate.proto .third_party/proto/buf/validate/; \
		install -m 0644 "$$(dir $(GOOGLEAPIS))"/third_party/googleapis/google/api/{annotations,http}.proto .third_party/proto/google/api/
	@$(TOOLS)/buf generate
	@$(TOOLS)/controller-gen object crd:maxDescLen=256 paths=./internal/apis/... output:crd:dir=deploy/crd
format: tools ## Format Go and proto sources
	@git ls-files '*.go' | grep -v '^gen/' | xargs -r gofmt -w
	@$(TOOLS)/buf format -w proto
lint: tools lint-only
lint-only:
	@$(TOOLS)/buf lint
	@$(TOOLS)/golangci-lint run --timeout 15m ./...
	@cd deploy/local && $(TOOLS)/golangci-lint run --config ../../.golangci.yml --timeout 15m $$($(LOCAL_PACKAGES))
style: tools style-only ## Check the language of Markdown, proto files and Go comments; .vale.ini says how
style-only:
	@git ls-files '*.md' '*.proto' '*.go' | grep -v '^gen/' | xargs $(TOOLS)/vale --output=line
openapi: $(BIN)/openapi/.installed ## Check the OpenAPI document with Spectral and openapi-typescript
	@cd $(<D)/node_modules/.bin && ./spectral lint --quiet --fail-severity warn --ruleset $(CURDIR)/internal/tools/openapi/spectral.yaml $(OPENAPI)
	@cd $(<D)/node_modules/.bin && ./openapi-typescript $(OPENAPI) -o $(<D)/api.ts >/dev/null && ./tsc --noEmit --strict $(<D)/api.ts
OPENAPI := $(CURDIR)/gen/openapi/fastsandbox.openapi.json
# In bin/, because npm installs beside package.json.
$(BIN)/openapi/.installed: internal/tools/openapi/package.json internal/tools/openapi/package-lock.json
	@command -v npm >/dev/null || { echo "npm is missing: install Node.js 20 or later" >&2; exit 1; }
	@mkdir -p $(@D) && cp $^ $(@D)
	@cd $(@D) && npm ci --ignore-scripts --no-audit --no-fund --loglevel error >/dev/null && touch $@
breaking: tools ## Compare the APIs with those on main
	@rm -rf .third_party/main && mkdir -p .third_party/main
	@git archive main proto buf.yaml | tar -x -C .third_party/main
	@mkdir -p .third_party/main/.third_party && cp -r .third_party/proto .third_party/main/.third_party/
	@$(TOOLS)/buf build .third_party/main -o .third_party/main.binpb
	@$(TOOLS)/buf build -o .third_party/here.binpb
	@$(TOOLS)/buf breaking .third_party/here.binpb --against .third_party/main.binpb
vuln: deps ## Find known vulnerabilities in what the binaries call: make vuln [VULNDB=file:///copy/of/the/database]
	@.ci/modules . internal/tools
	@$(BUILD_TOOL) ./vuln
	@$(TOOLS)/vuln -db "$(VULNDB)" -exceptions .ci/vulnerabilities.yaml .
verify: deps ## Generation, lint and style; fails if a generated or formatted file changes
	@.ci/modules . deploy/local internal/tools & $(MAKE) tools NEXT=generating; wait $$!
	@$(STEP) "generating" "formatting"
	@before="$$(.ci/fingerprint)"; $(MAKE) generate-only; \
		[ "$$before" = "$$(.ci/fingerprint)" ] || { echo "generated files were out of date: read git diff and commit it" >&2; exit 1; }
	@$(STEP) "checking the format" "linting"
	@unformatted="$$(git ls-files '*.go' | grep -v '^gen/' | xargs -r gofmt -l)"; \
		[ -z "$$unformatted" ] || { echo "not formatted (make format): $$unformatted" >&2; exit 1; }
	@$(TOOLS)/buf format -d --exit-code proto
	@for dir in . deploy/local internal/tools; do (cd $$dir && go mod verify >/dev/null && go mod tidy -diff >/dev/null 2> >(grep -v '^go: downloading' >&2)) || { echo "go.mod in $$dir is not tidy: run go mod tidy there" >&2; exit 1; }; done
	@$(STEP) "linting"
	@$(MAKE) style-only lint-only openapi
	@cd deploy/local && go vet $$($(LOCAL_PACKAGES))
	@$(STEP) "verified"

##### Testing

.PHONY: test unit fuzz integration e2e chaos escape flaky
test: ## Unit (-race), integration and end-to-end tests; builds and sets up what they need
	@.ci/stage unit $(MAKE) unit
	@.ci/stage build $(MAKE) build grpcurl
	@.ci/stage integration $(MAKE) integration
	@.ci/stage e2e $(MAKE) e2e
unit: deps ## Unit tests under the race detector
	@.ci/modules . deploy/local
	@CGO_ENABLED=1 go test -race -timeout 10m $(PACKAGES)
	@# Unvetted: vet would check all of Kubernetes.
	@cd deploy/local && go test -vet off -timeout 10m ./...
	@cd internal/tools && go test ./...
fuzz: deps ## Try every fuzz target with new inputs, 10 s each as CI does: make fuzz FUZZTIME=1m [FUZZ=wire.FuzzClaim]
	@.ci/modules . deploy/local
	@.ci/fuzz $(FUZZTIME) $(FUZZ)
FUZZTIME ?= 10s
integration: build ## Tests against a real containerd and a real apiserver with etcd
	@KUBEBUILDER_ASSETS=$(BIN)/k8s FSB_BIN=$(BIN) go test -tags integration -count 1 -p 1 -timeout 20m $(INTEGRATION)
e2e: build grpcurl ## Tests on the local cluster, brought up for them if it is not up, with two minutes of faults
	@FSB_BIN=$(BIN) .ci/with-cluster go test -tags e2e -count 1 -p 1 -timeout 25m ./tests/e2e/...
chaos: ## Load and faults on the local cluster, and an audit; one JSON object on stdout: make chaos DURATION=5m SEED=1
	@$(MAKE) build >&2
	@go build -o $(BIN)/chaos ./tests/e2e/chaos
	@.ci/with-cluster $(BIN)/chaos --duration $(DURATION) --seed $(SEED) $(CHAOS_FLAGS)
escape: ## Hostile sandboxes, images, agents and callers on the local cluster; one JSON object on stdout: make escape [ESCAPE_FLAGS="--only caller"]
	@$(MAKE) build >&2
	@go build -o $(BIN)/escape ./tests/e2e/escape
	@go build -ldflags "-s -w" -o $(BIN)/escape-hostile ./tests/e2e/escape/hostile
	@go build -ldflags "-s -w" -o $(BIN)/escape-agent ./tests/e2e/escape/agent
	@.ci/with-cluster $(BIN)/escape $(ESCAPE_FLAGS)
flaky: build ## Repeat tests to find unstable ones: make flaky UNIT=20 INTEGRATIONS=5 [PACKAGES=./agent/...]
	@.ci/flaky $(UNIT) $(INTEGRATIONS) $(PACKAGES)
UNIT ?= 20
INTEGRATIONS ?= 5
DURATION ?= 2m
SEED ?= 1
INTEGRATION = $(shell git grep -l --untracked '^//go:build integration' -- '*_test.go' | xargs -n 1 dirname | sort -u | sed 's|^|./|')

##### Benchmarks: docs/performance.md says what the numbers mean. BENCH_FLAGS="-o json --check --samples FILE --plot DIR"

.PHONY: bench bench-create bench-burst bench-exec bench-rate bench-density bench-registry bench-scale bench-janitor bench-gc bench-docs bench-binary bench-tool
bench: bench-binary ## Measure everything, beside its alternatives: make bench BENCH_FLAGS="-o json"
	@.ci/with-cluster $(BIN)/bench all $(BENCH_FLAGS)
bench-rate: bench-binary ## Creates and deletes at the highest rate that holds, on the local cluster: make bench-rate BENCH_FLAGS="--handler fsb --check"
	@.ci/with-cluster $(BIN)/bench rate $(BENCH_FLAGS)
bench-create bench-burst bench-exec bench-density: bench-binary ## One suite on the local cluster
	@.ci/with-cluster $(BIN)/bench $(@:bench-%=%) $(BENCH_FLAGS)
bench-registry: bench-tool ## One suite, which needs no cluster
	@$(BIN)/bench registry $(BENCH_FLAGS)
bench-scale: bench-tool ## One allocator with 2,000 simulated agents; an API server and etcd of its own
	@$(MAKE) components kube >&2
	@$(BIN)/bench scale --bin $(BIN) $(BENCH_FLAGS)
bench-janitor: bench-tool ## One janitor's scan of 1,000 running containers; an API server, etcd and containerd of its own
	@$(MAKE) components kube containerd >&2
	@$(BIN)/bench janitor --bin $(BIN) $(BENCH_FLAGS)
bench-gc: bench-tool ## The garbage collectors beside kube-controller-manager's; an API server and etcd of its own
	@$(MAKE) components kube >&2
	@$(BIN)/bench gc --bin $(BIN) $(BENCH_FLAGS)
bench-docs: bench-binary ## Measure everything again for docs/performance.md
	@.ci/with-cluster $(BIN)/bench all --save $(BIN)/bench-results --plot docs/performance $(BENCH_FLAGS)
	@$(BIN)/bench report --from $(BIN)/bench-results
bench-binary: bench-tool
	@$(MAKE) build >&2
bench-tool: deps
	@go build -o $(BIN)/bench ./tests/bench

.PHONY: clean
clean: ## Remove what was built
	@rm -rf $(BIN) .third_party
