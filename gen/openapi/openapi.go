// Package openapi carries the OpenAPI document of the REST API, as the generator beside it wrote it. Written by hand and
// kept by `make generate`, which replaces the document alone.
package openapi

import _ "embed"

//go:embed fastsandbox.swagger.json
var document string

// Document is the OpenAPI 2.0 document, as JSON.
func Document() []byte { return []byte(document) }
