// Package openapi holds the OpenAPI document of the REST API. `make generate` writes the document; this file is written by
// hand. Its functions are safe for concurrent use.
package openapi

import (
	_ "embed"
	"fmt"

	"sigs.k8s.io/yaml"
)

//go:embed fastsandbox.openapi.json
var document string

// JSON returns the OpenAPI 3.1 document as JSON.
func JSON() []byte { return []byte(document) }

// YAML returns the OpenAPI 3.1 document as YAML.
func YAML() ([]byte, error) {
	raw, err := yaml.JSONToYAML([]byte(document))
	if err != nil {
		return nil, fmt.Errorf("converting the OpenAPI document to YAML: %w", err)
	}
	return raw, nil
}
