package cmd

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"

	"github.com/spf13/pflag"
	"sigs.k8s.io/yaml"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/convert"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

// manifest is a Sandbox manifest in YAML or JSON.
type manifest struct {
	// name says in messages where the manifest is from.
	name string
	raw  []byte
}

// readManifest reads the manifest of -f.
func readManifest(c *cli, file string) (raw []byte, err error) {
	if file == "-" {
		raw, err = io.ReadAll(c.In)
	} else {
		raw, err = os.ReadFile(file)
	}
	if err != nil {
		return nil, usageError{fmt.Errorf("reading the manifest: %w", err)}
	}
	return raw, nil
}

// check parses the manifest strictly: an unknown or duplicate field is an error.
func (m manifest) check() error {
	var sandbox v1alpha1.Sandbox
	if err := yaml.UnmarshalStrict(m.raw, &sandbox); err != nil {
		return usageError{fmt.Errorf("reading %s: %w", m.name, err)}
	}
	if want := v1alpha1.GroupVersion.String(); sandbox.APIVersion != want || sandbox.Kind != "Sandbox" {
		return usagef("%s is of %s %s, want %s Sandbox", m.name, sandbox.APIVersion, sandbox.Kind, want)
	}
	return nil
}

// applyManifests sets in from manifests, of which a later one overrides an earlier one field by field. Lists are fields.
func applyManifests(c *cli, fs *pflag.FlagSet, in *sandboxv1.CreateSandboxRequest, layers []manifest) error {
	merged := map[string]any{}
	for _, m := range layers {
		if err := m.check(); err != nil {
			return err
		}
		var fields map[string]any
		if err := yaml.Unmarshal(m.raw, &fields); err != nil {
			return usageError{fmt.Errorf("reading %s: %w", m.name, err)}
		}
		mergeFields(merged, fields)
	}
	if len(merged) == 0 {
		return nil
	}
	raw, err := json.Marshal(merged)
	if err != nil {
		return fmt.Errorf("merging manifests: %w", err)
	}
	var sandbox v1alpha1.Sandbox
	if err := json.Unmarshal(raw, &sandbox); err != nil {
		return fmt.Errorf("merging manifests: %w", err)
	}
	if sandbox.Namespace != "" && fs.Changed("namespace") && sandbox.Namespace != c.settings.Namespace {
		return usagef("the namespace of the manifest is %s and --namespace is %s", sandbox.Namespace, c.settings.Namespace)
	}
	if sandbox.Namespace != "" {
		in.Namespace = sandbox.Namespace
	}
	in.Name, in.Labels, in.Spec = sandbox.Name, maps.Clone(sandbox.Labels), convert.SpecToProto(&sandbox.Spec)
	return nil
}

// mergeFields adds the fields of over to base.
func mergeFields(base, over map[string]any) {
	for key, value := range over {
		below, isMap := base[key].(map[string]any)
		if fields, ok := value.(map[string]any); ok && isMap {
			mergeFields(below, fields)
			continue
		}
		if value != nil { // a field without a value sets nothing
			base[key] = value
		}
	}
}
